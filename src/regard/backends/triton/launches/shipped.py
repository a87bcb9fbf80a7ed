"""Kernels that come compiled, so that a first call compiles nothing.

There is one file for each compute capability, with the commonest kernels and, for each, what it was
compiled for. It is used only as long as the sources are those it was made of, on GPUs of that
compute capability; whatever it does not hold is compiled. `prebuild.py` makes it.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from regard.backends.triton.launches.binaries import Binary
from regard.backends.triton.launches.cuda_driver import Tiling

_SOURCES = Path(__file__).parents[1]
FOLDER = _SOURCES / "kernels"
_INDEX = "index.json"


def place_of(capability: int) -> Path:
    """The file for GPUs of a compute capability: 90 is Hopper's."""
    return FOLDER / f"sm_{capability}.zip"


def signature(kernel: str, traits: Iterable[Any], constants: Mapping[str, Any]) -> str:
    """What a kernel is compiled for, as text."""
    return f"{kernel} {_written(tuple(traits))} {_written(tuple(sorted(constants.items())))}"


def _written(part: Any) -> str:
    if isinstance(part, tuple):
        return f"({', '.join(map(_written, part))})"
    return part.__name__ if isinstance(part, type) else repr(part)


@cache
def sources() -> str:
    """A hash of all that kernels are made of: it changes with any of these files."""
    mark = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*.py")):
        mark.update(path.relative_to(_SOURCES).as_posix().encode())
        mark.update(path.read_bytes())
    return mark.hexdigest()


def find(capability: int, what: str) -> Binary | None:
    """The kernel compiled for exactly this, if it was shipped."""
    known = _index(place_of(capability))
    if what not in known:
        return None
    entry = known[what]
    try:
        with zipfile.ZipFile(place_of(capability)) as file:
            code = file.read(entry["code"])
    except (OSError, KeyError, zipfile.BadZipFile):
        return None
    return Binary(
        code, entry["name"], entry["warps"], entry["shared"], tuple(entry["takes"]),
        tuple(Tiling(a, b, c, tuple(box)) for a, b, c, box in entry["tilings"]),
    )  # fmt: skip


def count(capability: int) -> int:
    """How many kernels were shipped for a compute capability."""
    return len(_index(place_of(capability)))


@cache
def _index(path: Path) -> dict[str, Any]:
    """What a file holds; nothing, where it is not there or was made of other sources."""
    try:
        with zipfile.ZipFile(path) as file:
            index = json.loads(file.read(_INDEX))
        return dict(index["kernels"]) if index["sources"] == sources() else {}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return {}


def write(path: Path, kernels: Mapping[str, Binary], compiler: str) -> None:
    """A file with kernels; the same code is held once."""
    index: dict[str, Any] = {"sources": sources(), "compiler": compiler, "kernels": {}}
    codes = {}
    for what, binary in sorted(kernels.items()):
        name = hashlib.sha256(binary.code).hexdigest()[:16] + ".cubin"
        codes[name] = binary.code
        index["kernels"][what] = {**binary._asdict(), "code": name}
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        # The same kernels give the same file.
        for name, data in [(_INDEX, json.dumps(index).encode()), *sorted(codes.items())]:
            entry = zipfile.ZipInfo(name)
            file.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    part.replace(path)
