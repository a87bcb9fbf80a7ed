"""Builds the front end of the web views into a wheel."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FrontEnd(BuildHookInterface[Any]):
    """Runs npm, unless there is a bundle as new as its sources. A checkout that is installed to be
    edited is built with `make frontend`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        view = Path(self.root) / "src" / "regard" / "view"
        bundle = view / "bundle" / "regard.js"
        sources = [p for p in (view / "frontend" / "src").rglob("*") if p.is_file()]
        newest = max((p.stat().st_mtime for p in sources), default=0.0)
        if version == "editable" or (bundle.exists() and bundle.stat().st_mtime >= newest):
            return
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("regard's wheel is built with npm: install node 18 or later")
        for command in (["ci"], ["run", "build"]):
            subprocess.run([npm, "--prefix", str(view / "frontend"), *command], check=True)
