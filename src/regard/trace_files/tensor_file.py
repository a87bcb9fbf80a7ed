"""Tensors in one safetensors file: each once, written as a stream, read when asked for.

A tensor is written without what its memory does not hold: axes of length one, and axes along which
one number is repeated, are left out, and the others are in the order of the memory. Its `Place`
says how to put them back. So a mask that was expanded over heads costs one head, `t` and `t[None]`
are one tensor, and a transposed tensor comes back transposed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.files import folder_of, is_folder, opened

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
WIDTHS = {kind: dtype.itemsize for kind, dtype in KINDS.items()}
NAMES = {dtype: kind for kind, dtype in KINDS.items()}

Progress = Callable[[int, int], None]
"""Called with the number of bytes written, and of all."""

DESCRIBED = {"dtype", "shape", "data_offsets"}
LONGEST_HEADER = 100_000_000
"""Bytes of a header that is read; safetensors reads no longer ones either."""
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)

PIECE = 1 << 24
"""Bytes written between two reports of progress."""
ALIGNMENT = 64


class Place(NamedTuple):
    """Where a tensor is: the name of what is stored, the tensor's shape, and which of its axes the
    stored one has, outermost first. Along the others the stored one is repeated."""

    name: str
    shape: list[int]
    axes: list[int]


class Held(NamedTuple):
    """A tensor as it is stored, and which axes of the original it has, outermost first."""

    tensor: Tensor
    axes: list[int]


def held(name: str, tensor: Tensor, *, repeated: bool) -> Held:
    """A tensor without what its memory does not hold. Unless `repeated`, axes that repeat one
    number are stored in full."""
    t = tensor.detach()
    if t.device.type == "meta" or t.layout != torch.strided or t.dtype not in NAMES:
        raise RegardError(
            f"{name} cannot be written to a file",
            got=f"{t.dtype} on {t.device}, {t.layout}",
            accepted="strided tensors with data: "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES),
        )
    t = t.resolve_neg()
    if not repeated and 0 in t.stride():
        # (`contiguous` takes a tensor of no numbers for one that is, whatever its strides.)
        t = t.clone(memory_format=torch.contiguous_format)
    sizes = zip(t.shape, t.stride(), strict=True)
    axes = [a for a, (n, step) in enumerate(sizes) if n != 1 and (step or not n)]
    steps = t.stride()
    order = sorted(axes, key=lambda a: -steps[a])
    short = t[tuple(slice(None) if a in axes else 0 for a in range(t.ndim))]
    return Held(short.permute([axes.index(a) for a in order]), order)


def whereabouts(t: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are the same memory, seen the same way."""
    return t.device, t.data_ptr(), t.dtype, t.shape, t.stride()


@runtime_checkable
class Drawer(Protocol):
    """Where the tensors of a record are put."""

    def put(self, name: str, tensor: Tensor, *, repeated: bool = False) -> Place: ...


class Draft:
    """Tensors on their way into a file. What shares memory is written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def put(self, name: str, tensor: Tensor, *, repeated: bool = False) -> Place:
        """Take a tensor in. Unless `repeated`, axes that repeat one number are written in full."""
        short, axes = held(name, tensor, repeated=repeated)
        key = whereabouts(short)
        if key not in self._names:
            self._names[key] = name
            # Holding it keeps its memory from being taken by another.
            self.tensors[name] = short
        return Place(self._names[key], list(tensor.shape), axes)

    def write(
        self,
        file: BinaryIO,
        describe: Callable[[Mapping[str, str]], dict[str, str]],
        progress: Progress | None,
    ) -> None:
        """Write everything. `describe` gives the metadata from the checksum of each tensor; its
        length may not depend on them, since the header goes in last, where room was left."""
        # Largest alignment first: then every tensor starts at its own.
        order = sorted(self.tensors, key=lambda name: -_alignment(self.tensors[name]))
        entries = [
            Entry(name, NAMES[t.dtype], list(t.shape), t.nbytes)
            for name, t in ((name, self.tensors[name]) for name in order)
        ]
        total, done = sum(entry.size for entry in entries), 0
        room = len(header(entries, describe(dict.fromkeys(order, checked(0)))))
        file.write(bytes(room))
        checks = {}
        if progress is not None:
            progress(0, total)
        for name in order:
            check = 0
            for piece in pieces(self.tensors[name]):
                file.write(piece)
                check = zlib.crc32(piece, check)
                done += len(piece)
                if progress is not None:
                    progress(done, total)
            checks[name] = checked(check)
        head = header(entries, describe(checks))
        assert len(head) == room
        file.seek(0)
        file.write(head)
        file.flush()
        os.fsync(file.fileno())


class Entry(NamedTuple):
    """What the header of a file says of a tensor; its bytes follow those of the entry before."""

    name: str
    kind: str
    shape: list[int]
    size: int


def header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    """The beginning of a file."""
    head: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, kind, shape, size in entries:
        head[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor. A copy in order, or from another device, is soon gone."""
    here = tensor.cpu().contiguous()
    data = _bytes(here)
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


class Source:
    """A file of tensors. Each is read when it is asked for.

    Nothing is mapped into memory: another program that cuts a mapped file short ends every process
    that looks at it. What is read is a copy, shared by those who ask while it is there.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device
        self._sound: set[str] = set()
        self._here: WeakValueDictionary[str, torch.UntypedStorage] = WeakValueDictionary()
        self._one_at_a_time = Lock()
        self._file: BinaryIO | None = None
        try:
            file = opened(path)
        except (OSError, ValueError) as error:
            code = error.errno if isinstance(error, OSError) else None
            missing = code is None or code in MISSING
            reason = "" if code is None or missing else f": {os.strerror(code)}"
            raise RegardError(
                "there is no such file" if missing else "the file cannot be read",
                got=f"{path}{reason}",
                accepted="a file that Seen.save wrote",
                do=""
                if not _begun(path)
                else "it is still being written, or that was broken off: "
                "then record it again, which removes what was left",
            ) from None
        try:
            self._state = _state(file)
            self.metadata, self.stored, self._starts = _header(file)
        except (OSError, ValueError) as error:
            file.close()
            raise broken(path, str(error)) from None
        self._file = file
        # Whoever forgets to close it leaves nothing open for longer than it is held.
        finalize(self, file.close)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._state[0]

    def read(self, place: Place, check: str) -> Tensor:
        """A tensor, held against its checksum the first time."""
        with self._one_at_a_time:
            return put_back(self._read(place.name, check).to(self.device), place)

    def _read(self, name: str, check: str) -> Tensor:
        if self._file is None:
            raise RegardError(
                f"{self.path} was closed", do="ask before closing it, or open it with regard.load"
            )
        kind, shape = self.stored[name]
        there = self._here.get(name)
        if there is not None:
            return torch.empty(0, dtype=KINDS[kind]).set_(there, 0, shape, _steps(shape))
        t = torch.empty(shape, dtype=KINDS[kind])
        try:
            self._file.seek(self._starts[name])
            whole = not t.nbytes or self._file.readinto(_bytes(t)) == t.nbytes  # type: ignore[attr-defined]
            state = _state(self._file)
        except OSError as error:
            raise broken(self.path, str(error)) from None
        if state != self._state:
            # Somebody wrote into it: what was right before may not be now.
            self._sound.clear()
            self._state = state
        if not whole:
            raise broken(self.path, f"it was cut short after it was opened: no {name!r}")
        if name not in self._sound:
            if checked(zlib.crc32(_bytes(t))) != check:
                raise broken(self.path, f"tensor {name!r} is not what was written")
            self._sound.add(name)
        self._here[name] = t.untyped_storage()
        return t

    def close(self) -> None:
        """Let go of the file. Tensors that were read stay."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _begun(path: Path) -> bool:
    """Whether a file is being written, or was left unfinished."""
    return is_folder(folder_of(path))


def _state(file: BinaryIO) -> tuple[int, int]:
    """What changes when a file is written to."""
    about = os.fstat(file.fileno())
    return about.st_size, about.st_mtime_ns


class Header(NamedTuple):
    """What a file says of its tensors."""

    metadata: dict[str, str]
    stored: dict[str, tuple[str, list[int]]]
    """Type and shape of each, by name."""
    starts: dict[str, int]


def _header(file: BinaryIO) -> Header:
    """The beginning of a file, if it is true: tensors lie behind one another and fill the file."""
    size = os.fstat(file.fileno()).st_size
    room = int.from_bytes(file.read(8), "little")
    if size < 8 or room > min(size - 8, LONGEST_HEADER):
        raise ValueError(f"it is cut short, or no safetensors file: {size} bytes")
    try:
        head = json.loads(file.read(room).decode())
    except RecursionError:
        raise ValueError("its header is nested too deep") from None
    if not isinstance(head, dict):
        raise ValueError("its header is not a JSON object")
    metadata = head.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not a JSON object of texts")
    stored: dict[str, tuple[str, list[int]]] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, entry in head.items():
        if isinstance(entry, dict) and entry.keys() == DESCRIBED:
            kind, shape, at = entry["dtype"], entry["shape"], entry["data_offsets"]
            lists = isinstance(kind, str) and isinstance(shape, list) and isinstance(at, list)
            if lists and [type(n) for n in at] == [int, int]:
                stored[name], places[name] = (kind, shape), (at[0], at[1])
                if at[1] - at[0] == _size(kind, shape):
                    continue
        raise ValueError(f"tensor {name!r:.80} is not described as one")
    end = 0
    for name, (start, stop) in sorted(places.items(), key=lambda place: place[1]):
        if start != end:
            raise ValueError(f"tensor {name!r:.80} does not begin where the one before ends")
        end = stop
    if 8 + room + end != size:
        raise ValueError(f"it has {size} bytes, and its header tells of {8 + room + end}")
    starts = {name: 8 + room + start for name, (start, _) in places.items()}
    return Header(metadata, stored, starts)


def _size(kind: str, shape: list[Any]) -> int:
    """The bytes of a tensor; -1 if there can be no such tensor."""
    size = WIDTHS.get(kind, 0)
    for n in shape:
        if type(n) is not int or n < 0:
            return -1
        size *= n
    return size if kind in WIDTHS else -1


def _steps(shape: list[int]) -> list[int]:
    """How far apart neighbours lie along each axis of a contiguous tensor."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def put_back(held: Tensor, place: Place) -> Tensor:
    """A stored tensor with the axes it had."""
    ascending = sorted(place.axes)
    held = held.permute([place.axes.index(a) for a in ascending])
    here = tuple(slice(None) if a in ascending else None for a in range(len(place.shape)))
    return held[here].expand(place.shape)


def broken(path: Path, why: str) -> RegardError:
    """The error for a file that cannot be read, whatever the reason."""
    return RegardError(
        f"{path} cannot be read as a trace file",
        got="; ".join(line.strip() for line in why[:600].splitlines()),
        accepted="a file that Seen.save wrote, whole and unchanged",
        do="copy or save it again; the file is left as it is",
    )


def checked(crc: int) -> str:
    return f"{crc:08x}"


def _alignment(t: Tensor) -> int:
    return math.gcd(t.nbytes, ALIGNMENT)


def _bytes(t: Tensor) -> memoryview:
    """The memory of a contiguous tensor. (Without numpy, which torch does not need.)"""
    size = t.nbytes
    if not size:
        return memoryview(b"")
    # The view must not outlive the tensor: callers hold both.
    return memoryview((ctypes.c_char * size).from_address(t.data_ptr())).cast("B")
