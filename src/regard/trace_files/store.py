"""Trace files: what was seen, kept on disk and read again layer by layer.

One safetensors file. Its metadata holds a JSON text under "regard", and under "check" the CRC-32 of
that text:

    version   of this format; a file of a later one is refused
    regard    the version that wrote it
    model     the class of the model
    tokens    what the sequences said, or null
    tensors   of each tensor its type, its shape and the CRC-32 of its bytes
    layers    of each layer its path, calls, runs, steps, statistics and traces

Nothing in a file is executed or believed. When it is opened, every record in it (see records.py) is
held against the tensors that are there, and goes through the checks of a call on shapes alone, as
far as there are not too many kinds of them; when a trace is read, it goes through them again, and
its bytes are checked.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, overload

import torch
from torch import Tensor

from regard.arguments import device_of, path_of
from regard.errors import RegardError
from regard.files import replacing
from regard.inputs import DTYPES
from regard.seen import Layer, Seen, Statistics, Tokens
from regard.trace_files.records import (
    LARGEST,
    PLACES,
    Read,
    Tensors,
    check_lengths,
    check_parts,
    check_place,
    check_trace,
    expect,
    recorded,
    restored,
    shown,
)
from regard.trace_files.tensor_file import (
    KINDS,
    NAMES,
    Draft,
    Drawer,
    Place,
    Progress,
    Source,
    broken,
    put_back,
)
from regard.traces import Trace
from regard.version import __version__

VERSION = 1
PRIVATE = 0o600
"""The permissions of a new file: a trace holds what a model read."""


MANY = 256
"""So many kinds of calls are made of shapes alone when a file is opened; others are checked by the
same checks when they are read."""
FEW = 4096
"""So many places may be told of without a number for them in the file."""


def save(
    seen: Seen,
    path: str | os.PathLike[str],
    tokens: Tokens | None = None,
    progress: Progress | None = None,
) -> None:
    """Write what was seen to a file, whole or not at all."""
    place, draft = path_of(path), Draft()
    layers = [
        layer_record(
            layer,
            draft,
            (recorded(t, f"{layer.path}/{call}", draft) for call, t in enumerate(layer.traces)),
        )
        for layer in seen.values()
    ]
    about = description(seen, tokens, layers)

    def describe(checks: Mapping[str, str]) -> dict[str, str]:
        return metadata(
            about,
            {
                name: [NAMES[t.dtype], list(t.shape), checks[name]]
                for name, t in draft.tensors.items()
            },
        )

    with readable(place) as file:
        draft.write(file, describe, progress)


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write one trace to a file: as what was seen of the only call of a layer without a name."""
    seen = Seen()
    seen.layer("").take(trace.detach(), 0, keep=True)
    save(seen, path)


def description(seen: Seen, tokens: Tokens | None, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """What a file says of itself, but for its tensors."""
    return {
        "version": VERSION,
        "regard": __version__,
        "model": seen.model,
        "tokens": _tokens(seen.tokens if tokens is None else tokens),
        "layers": layers,
    }


def metadata(about: dict[str, Any], tensors: dict[str, list[Any]]) -> dict[str, str]:
    """A description in the metadata of a file. Of each tensor: type, shape and checksum."""
    text = json.dumps(about | {"tensors": tensors}, separators=(",", ":"))
    return {"regard": text, "check": _checksum(text)}


@contextmanager
def readable(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` once it has been read again."""
    with replacing(path, PRIVATE) as unfinished:
        with unfinished.open("r+b") as file:
            yield file
        try:
            load(unfinished).close()
        except RegardError as error:
            raise RegardError(
                "what was seen could not be read again, so nothing was written",
                got="; ".join(line.strip() for line in str(error).splitlines()[1:2]),
                accepted="traces of regard's own backends, masks, biases and scores",
            ) from None


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Stored:
    """Open a trace file that `Seen.save` wrote.

    Tensors are read when a layer's traces are asked for, so that a file larger than memory can be
    looked through. Close it, or use it in a `with`.
    """
    source = Source(path_of(path), device_of(device))
    try:
        about = _description(source)
        _check(about, source)
        return Stored(source, about)
    except RegardError:
        source.close()
        raise


class Stored(Seen):
    """What was seen, in a file. Layers are read one at a time."""

    def __init__(self, source: Source, about: dict[str, Any]) -> None:
        checks = {name: tensor[2] for name, tensor in about["tensors"].items()}
        super().__init__(about["model"])
        self.tokens = about["tokens"]
        self.version: str = about["regard"]
        """The version of regard that wrote the file."""
        self._source = source
        self._reading: tuple[str, dict[int, Trace]] = "", {}

        def read(place: Place) -> Tensor:
            return source.read(place, checks[place.name])

        for record in about["layers"]:
            path = record["path"]
            found = record["statistics"]
            sums = None if found is None else Statistics(*read(Place(*found)))
            traces = StoredTraces(self, path, record["traces"], read)
            places = record["runs"], record["steps"]
            self._layers[path] = Layer(path, record["calls"], sums, traces, *places)

    def _trace(self, path: str, call: int, record: dict[str, Any], read: Read) -> Trace:
        """One trace. Those of the layer that was asked last are kept."""
        if self._reading[0] != path:
            self._reading = path, {}
        kept = self._reading[1]
        if call not in kept:
            try:
                kept[call] = restored(record, read)
            except RegardError as error:
                if str(self._source.path) in str(error):
                    raise
                reason = f"call {call} of {path!r}: {error}"
                raise broken(self._source.path, reason) from None
        return kept[call]

    def close(self) -> None:
        """Let go of the file. Traces that were taken out of it stay whole."""
        self._reading = "", {}
        self._source.close()

    def __enter__(self) -> Stored:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


class StoredTraces(Sequence[Trace]):
    """The traces of a layer, each read when it is asked for."""

    def __init__(self, seen: Stored, path: str, records: list[dict[str, Any]], read: Read) -> None:
        self._seen, self._path, self._records, self._read = seen, path, records, read

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, call: int) -> Trace: ...
    @overload
    def __getitem__(self, call: slice) -> list[Trace]: ...
    def __getitem__(self, call: int | slice) -> Trace | list[Trace]:
        places = range(len(self))[call]
        if isinstance(places, range):
            return [self[i] for i in places]
        return self._seen._trace(self._path, places, self._records[places], self._read)


def layer_record(layer: Layer, drawer: Drawer, traces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a file says of a layer."""
    sums = layer.statistics
    name = f"{layer.path}/statistics"
    return {
        "path": layer.path,
        "calls": layer.calls,
        "runs": layer.runs,
        "steps": layer.steps,
        "statistics": None
        if sums is None
        else drawer.put(name, torch.stack([getattr(sums, f.name) for f in fields(sums)])),
        "traces": list(traces),
    }


def _description(source: Source) -> Any:
    """What a file says of itself, if this regard can understand it."""
    text = source.metadata.get("regard")
    if text is None:
        raise broken(source.path, "a safetensors file without traces")
    if source.metadata.get("check") != _checksum(text):
        raise broken(source.path, "its description is not what was written")
    try:
        about = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise broken(source.path, f"its description is no JSON: {error}") from None
    version = about.get("version") if isinstance(about, dict) else None
    if type(version) is int and version > VERSION:
        raise RegardError(
            f"{source.path} has a later format than this regard reads",
            got=f"version {shown(version)}, written by regard {shown(about.get('regard'))}",
            accepted=f"version {VERSION}",
            do="install a newer regard: pip install --upgrade regard",
        )
    return about


def _check(about: Any, source: Source) -> None:
    """Refuse what cannot be true of the tensors in the file. Reads none of them."""
    try:
        check_parts(
            about, "the file", version=int, regard=str, model=str, tokens=object, tensors=dict,
            layers=list,
        )  # fmt: skip
        expect(about["version"] == VERSION, "version", about["version"])
        _tokens(about["tokens"])
        stored = _check_tensors(about["tensors"], source)

        def imagined(place: Place) -> Tensor:
            kind, shape = stored[place.name]
            return put_back(torch.empty(shape, dtype=KINDS[kind], device="meta"), place)

        known: set[str] = set()
        paths = [_check_layer(record, stored, imagined, known) for record in about["layers"]]
        expect(len(set(paths)) == len(paths), "a layer is there twice", paths)
    except RegardError as error:
        raise broken(source.path, str(error)) from None


def _check_tensors(described: dict[str, Any], source: Source) -> Tensors:
    stored = {}
    for name, entry in described.items():
        match entry:
            case [str(kind), list(shape), str()] if kind in KINDS:
                stored[name] = kind, check_lengths(shape, name)
            case _:
                expect(False, f"tensor {shown(name)}", entry)
    odd = [] if stored == source.stored else _differing(stored, source.stored)
    expect(not odd, "tensors that are not as described", sorted(odd)[:4])
    for name, (_, shape) in stored.items():
        # A tensor of nothing could claim any length, and cost nothing to write.
        if 0 in shape:
            claimed = math.prod(n for n in shape if n)
            expect(claimed <= max(FEW, source.size), f"{shown(name)} claims too much", shape)
    return stored


def _differing(a: Tensors, b: Tensors) -> list[str]:
    return [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]


def _check_layer(record: Any, stored: Tensors, imagined: Read, known: set[str]) -> str:
    check_parts(
        record, "a layer", path=str, calls=int, runs=list, steps=list, statistics=list | None,
        traces=list,
    )  # fmt: skip
    path: str = record["path"]
    if record["statistics"] is not None:
        sums = imagined(check_place(record["statistics"], stored))
        fits = sums.ndim == 2 and len(sums) == len(fields(Statistics)) and sums.dtype in DTYPES
        expect(fits, f"the statistics of {path!r}", record["statistics"])
    expect(len(record["traces"]) <= record["calls"] < LARGEST, "calls", record["calls"])
    for name in ("runs", "steps"):
        counted = record[name]
        whole = all(type(i) is int and 0 <= i < LARGEST for i in counted)
        expect(whole and len(counted) in (0, len(record["traces"])), name, counted)
    for call, trace in enumerate(record["traces"]):
        try:
            check_trace(trace, stored)
            # Most calls of a model are alike: what was made once with these shapes can be again.
            if len(known) < MANY and (shape := _without_names(trace, stored)) not in known:
                restored(trace, imagined)
                known.add(shape)
        except RegardError as error:
            raise RegardError(f"call {call} of {path!r}: {error}") from None
    return path


def _without_names(trace: dict[str, Any], stored: Tensors) -> str:
    """All that `restored` sees of a record before a tensor is read."""

    def kind(place: list[Any]) -> list[Any]:
        return [stored[place[0]][0], *place[1:]]

    alike = {name: part and kind(part) if name in PLACES else part for name, part in trace.items()}
    return repr(sorted((alike | {"tensors": list(map(kind, trace["tensors"]))}).items()))


def _tokens(tokens: Any) -> Tokens | None:
    """One list of texts, or one per sequence."""
    if tokens is None:
        return None
    if _are(tokens, str):
        return list(tokens)
    if isinstance(tokens, Sequence) and all(_are(row, str) for row in tokens):
        return [list(row) for row in tokens]
    raise RegardError(
        "tokens= are the texts of a sequence",
        got=shown(tokens),
        accepted='a list of texts, ["The", " cat"], or one such list per sequence',
        do="tokenizer.convert_ids_to_tokens(ids), or [tokenizer.decode(i) for i in ids]",
    )


def _are(items: Any, kind: type) -> bool:
    if not isinstance(items, Sequence) or isinstance(items, str):
        return False
    return all(isinstance(item, kind) for item in items)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
