"""Where the peers' own tests come from: their repositories, at the version that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A package whose wheel leaves out its tests, and which folders of its repository have them."""

    name: str
    package: str
    repository: str
    folders: tuple[str, ...]

    @property
    def tag(self) -> str:
        return "v" + version(self.package).partition("+")[0]

    def checkout(self, given: Path | None = None) -> Path:
        """The folder that was given, or a clone in the user's cache; nothing of it is installed."""
        if given is not None:
            missing = [name for name in self.folders if not (given / name).is_dir()]
            if missing:
                raise SystemExit(f"{given} is no checkout of {self.name}: no {missing[0]}/ in it")
            return given.resolve()
        into = cache() / f"{self.name}-{self.tag}"
        if not into.exists():
            part = into.with_name(into.name + ".part")
            part.parent.mkdir(parents=True, exist_ok=True)
            # What is there was interrupted.
            shutil.rmtree(part, ignore_errors=True)
            _git("clone", "--quiet", "--depth=1", "--filter=blob:none", "--sparse",
                 f"--branch={self.tag}", self.repository, str(part))  # fmt: skip
            _git("-C", str(part), "sparse-checkout", "set", *self.folders)
            part.rename(into)
        return into


TRANSFORMERS = Peer(
    "transformers",
    "transformers",
    "https://github.com/huggingface/transformers",
    ("src", "tests", "utils"),
)
PYTORCH = Peer("pytorch", "torch", "https://github.com/pytorch/pytorch", ("test",))


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "regard" / "peers"


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True)
