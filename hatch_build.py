"""Builds the front end of the web views into an sdist and a wheel."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NEEDS = "the front end of the web views is built with npm: install node 18 or later"


class FrontEnd(BuildHookInterface[Any]):
    """Runs npm, unless there is a bundle as new as its sources.

    An sdist holds the bundle, so that a wheel built from it needs no npm; without npm it is not
    made. A wheel that is built from a checkout (pip install git+…) goes without the bundle then:
    everything but the web views works, and these say what to do. A checkout that is installed to be
    edited is built with `make frontend`.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        view = Path(self.root) / "src" / "regard" / "view"
        bundle = view / "bundle" / "regard.js"
        if version == "editable" or _is_fresh(bundle, view / "frontend" / "src"):
            return
        # An sdist was made with its bundle. Whatever unpacked it may have changed times.
        if bundle.exists() and (Path(self.root) / "PKG-INFO").exists():
            return
        try:
            _build(view / "frontend")
        except (OSError, subprocess.CalledProcessError) as error:
            if self.target_name == "sdist" or bundle.exists():
                kept = f", and {bundle} is older than its sources" if bundle.exists() else ""
                raise RuntimeError(f"{NEEDS} ({error}){kept}") from None
            self.app.display_warning(f"{NEEDS} ({error}). This wheel is without them.")


def _is_fresh(bundle: Path, sources: Path) -> bool:
    newest = max((p.stat().st_mtime for p in sources.rglob("*") if p.is_file()), default=0.0)
    return bundle.exists() and bundle.stat().st_mtime >= newest


def _build(frontend: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm was not found")
    for command in (["ci"], ["run", "build"]):
        subprocess.run([npm, "--prefix", str(frontend), *command], check=True)
