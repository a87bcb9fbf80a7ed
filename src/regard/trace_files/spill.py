"""Traces that are written to disk as they come, and read again when they are asked for.

A safetensors file begins with a list of what is in it, which is not known before the end. So bytes
go to a folder beside the file, one part for each width of number, and when the watching ends they
are put together behind their list. If it ends badly the folder is removed, and a file that was
there before is as it was. If the process is killed the folder stays, until the file is written
again: only one at a time writes it (see files/claims.py).
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, NamedTuple, overload

from torch import Tensor

from regard.arguments import path_of
from regard.errors import RegardError
from regard.files import claimed
from regard.seen import Layer, Seen
from regard.trace_files.records import recorded
from regard.trace_files.store import (
    StoredTraces,
    description,
    layer_record,
    load,
    metadata,
    readable,
)
from regard.trace_files.tensor_file import (
    NAMES,
    PIECE,
    Entry,
    Place,
    checked,
    header,
    held,
    pieces,
    whereabouts,
)
from regard.traces import Trace

WIDTHS = (8, 4, 2, 1)
"""Bytes of a number. Widest first: then every tensor of the file starts where it may."""


class Shared(NamedTuple):
    """A tensor that calls share, how often had been written to it, and its name in the file."""

    tensor: Tensor
    version: int | None
    name: str


class Spilled(Sequence[Trace]):
    """The traces of a layer, on disk: read when asked for, once the watching has ended."""

    def __init__(self, spill: Spill, path: str) -> None:
        self._spill, self._path = spill, path
        self.records: list[dict[str, Any]] = []
        self.stored: StoredTraces | None = None

    def append(self, trace: Trace) -> None:
        name = f"{self._path}/{self._spill.number(self._path)}"
        self.records.append(recorded(trace, name, self._spill))

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, call: int) -> Trace: ...
    @overload
    def __getitem__(self, call: slice) -> list[Trace]: ...
    def __getitem__(self, call: int | slice) -> Trace | list[Trace]:
        if self.stored is None:
            raise RegardError(
                f"the traces of {self._path!r} cannot be read",
                got=self._spill.state,
                do="ask for them when the watching has ended well; it writes the file then",
            )
        return self.stored[call]


class Spill:
    """A trace file that grows while a model is watched."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path).absolute()
        self.state = "they are still being written"
        self._parts: dict[int, BinaryIO] = {}
        self._entries: dict[int, list[Entry]] = {width: [] for width in WIDTHS}
        self._checks: dict[str, str] = {}
        self._shared: dict[tuple[Any, ...], Shared] = {}
        self._numbers: dict[str, int] = {}
        self._open = ExitStack()

    def start(self) -> None:
        """Make room on disk."""
        if self._parts:
            raise RegardError(
                "this watch has ended, and its file is written or dropped",
                got=f"spill={str(self.path)!r}",
                do="make a new one with regard.watch",
            )
        with _explained():
            if self.path.is_dir():
                raise IsADirectoryError(f"{self.path} is a folder")
            folder = self._open.enter_context(claimed(self.path))
            for width in WIDTHS:
                part = (folder / str(width)).open("x+b")
                self._parts[width] = self._open.enter_context(part)

    def number(self, path: str) -> int:
        """The number of a new trace of a layer."""
        self._numbers[path] = self._numbers.get(path, -1) + 1
        return self._numbers[path]

    def forget_shared(self) -> None:
        """Let go of what the calls of a run have in common."""
        self._shared.clear()

    def put(self, name: str, tensor: Tensor, *, repeated: bool = False) -> Place:
        """Write a tensor. One of a mask or bias, which calls share, is written once in a run."""
        short, axes = held(name, tensor, repeated=repeated)
        key = whereabouts(short)
        if key in self._shared and self._is_written(self._shared[key], short):
            return Place(self._shared[key].name, list(tensor.shape), axes)
        if repeated:
            # Holding it keeps its memory from being taken by another.
            self._shared[key] = Shared(short, _version(short), name)
        width, check = short.element_size(), 0
        with _explained():
            for piece in pieces(short):
                self._parts[width].write(piece)
                check = zlib.crc32(piece, check)
        entry = Entry(name, NAMES[short.dtype], list(short.shape), short.nbytes)
        self._entries[width].append(entry)
        self._checks[name] = checked(check)
        return Place(name, list(tensor.shape), axes)

    def _is_written(self, shared: Shared, now: Tensor) -> bool:
        """Whether what was written is what the tensor holds now: a model may have set its mask
        anew in place."""
        if shared.version is not None:
            return shared.version == _version(now)
        check = 0
        for piece in pieces(now):
            check = zlib.crc32(piece, check)
        return self._checks[shared.name] == checked(check)

    def finish(self, seen: Seen) -> None:
        """Put the parts together, and let the layers read from the file."""
        try:
            layers = [layer_record(layer, self, _records(layer)) for layer in seen.values()]
            entries = [entry for width in WIDTHS for entry in self._entries[width]]
            about = description(seen, None, layers)
            tensors = {e.name: [e.kind, e.shape, self._checks[e.name]] for e in entries}
            with readable(self.path) as file:
                file.write(header(entries, metadata(about, tensors)))
                for part in self._parts.values():
                    part.seek(0)
                    shutil.copyfileobj(part, file, PIECE)
                file.flush()
                os.fsync(file.fileno())
        finally:
            self.drop()
        again = load(self.path)
        for path, layer in seen.items():
            stored = again[path].traces
            if isinstance(layer.traces, Spilled) and isinstance(stored, StoredTraces):
                layer.traces.stored = stored
        self.state = f"they are in {self.path}"

    def drop(self) -> None:
        """Remove what is not a whole file."""
        self.state = "watching ended with an error, and nothing was kept"
        self.forget_shared()
        self._open.close()


def _version(tensor: Tensor) -> int | None:
    """The version counter of a tensor; None if it has none."""
    return None if tensor.is_inference() else tensor._version


def _records(layer: Layer) -> list[dict[str, Any]]:
    assert isinstance(layer.traces, Spilled)
    return layer.traces.records


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RegardError(
            "traces cannot be written to disk",
            got=str(error),
            accepted="spill= a path in a folder that exists, can be written to and has room twice "
            "for what is kept",
            do="choose another path, or fewer layers= or heads=; nothing was replaced",
        ) from None
