"""Builds the front end of the web views into a wheel."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FrontEnd(BuildHookInterface[Any]):
    """Runs npm, unless the sources come with a bundle. A checkout is built with `make frontend`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        view = Path(self.root) / "src" / "regard" / "view"
        if version == "editable" or (view / "bundle" / "regard.js").exists():
            return
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("regard's wheel is built with npm: install node 18 or later")
        for command in (["ci"], ["run", "build"]):
            subprocess.run([npm, "--prefix", str(view / "frontend"), *command], check=True)
