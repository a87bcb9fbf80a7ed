"""Where the peers' own tests come from: their repositories, at the version that is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A package whose wheel leaves out its tests, and which folders of its repository have them."""

    name: str
    package: str
    repository: str
    folders: tuple[str, ...]
    version_file: str = "version.txt"

    @property
    def tag(self) -> str:
        return "v" + metadata.version(self.package).partition("+")[0]

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
            try:
                _git("clone", "--quiet", "--depth=1", "--filter=blob:none", "--sparse",
                     f"--branch={self.tag}", self.repository, str(part))  # fmt: skip
                _git("-C", str(part), "sparse-checkout", "set", *self.folders)
            except subprocess.CalledProcessError as error:
                shutil.rmtree(part, ignore_errors=True)
                raise SystemExit(self._what_to_do(error.stderr.strip())) from None
            part.rename(into)
        return into

    def version(self, checkout: Path) -> str:
        """Of which version the tests are: of another than is installed, if a checkout was given."""
        file = checkout / self.version_file
        found = re.search(r"\d+\.\d+\.[\w.+]+", file.read_text()) if file.exists() else None
        return found[0] if found else "unknown"

    def _what_to_do(self, said: str) -> str:
        clone = f"git clone --depth=1 --branch={self.tag} {self.repository}"
        return (
            f"the tests of {self.name} {self.tag} could not be cloned: they are in no wheel\n"
            f"git said: {said}\n"
            f"do: where there is a network, {clone}\n"
            f"    and here, with its folder: make peers {self.name.upper()}=FOLDER\n"
            f"    one peer alone: make peers ONLY=transformers, or ONLY=pytorch"
        )


TRANSFORMERS = Peer(
    "transformers",
    "transformers",
    "https://github.com/huggingface/transformers",
    ("src", "tests", "utils"),
    "src/transformers/__init__.py",
)
PYTORCH = Peer("pytorch", "torch", "https://github.com/pytorch/pytorch", ("test",))


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "regard" / "peers"


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, stderr=subprocess.PIPE, text=True)
