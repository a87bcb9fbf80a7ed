"""The record of a trace in a file, and the trace of a record.

A record names its tensors by `Place`, and spells masks, biases and the comparison as
`regard.values` spells them. Nothing in it is believed: a trace is made by the functions, and goes
through the checks, that a call goes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from reprlib import Repr
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard import biases, masks
from regard.backends.contract import Rows
from regard.biases.bias import Bias
from regard.calls.choice import BACKENDS
from regard.errors import RegardError
from regard.inputs import DTYPES, check
from regard.masks.algebra import And, Mask, Not, Or, pairs
from regard.masks.global_tokens import BoundGlobalTokens
from regard.masks.packed import Packed
from regard.masks.where import BoundWhere
from regard.scores.comparison import Comparison, Dot, Nearness, TanhSum
from regard.scores.score import Prepared, Score, finite_scale, per_head, positive, same_width
from regard.trace_files.tensor_file import Drawer, Place
from regard.traces import Trace
from regard.values import Shape, Value, decode, encode

LARGEST = 1 << 62
"""No whole number in a file is larger: arithmetic on places has 64 bits."""
LARGEST_TABLE = 1 << 28
"""Bytes that a mask of a function may take in a file."""
LONGEST, DEEPEST = 1 << 20, 200
"""How long the text of a trace's values is, and how deep masks are combined of masks, at most: so
that no recursion runs out."""

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80

Read = Callable[[Place], Tensor]
Tensors = Mapping[str, tuple[str, list[int]]]
"""Type and shape of what is in a file, by name."""
V = TypeVar("V", bound=Value)


PLACES = ("q", "k", "v", *Rows._fields, "sink", "seed")
"""The parts of a record that are tensors, or none."""


def recorded(trace: Trace, name: str, draft: Drawer) -> dict[str, Any]:
    """What a file says of a trace."""
    x = trace.inputs
    mask = None if x.mask is None else _written_out(x.mask, x.shape)
    if x.bias is not None and x.bias.is_local():
        raise RegardError(
            "a bias made of a function cannot be written to a file: files hold no code",
            got=repr(x.bias),
            do="use biases.alibi, biases.relative or biases.dense where traces are to be saved",
        )
    # A mask given as a function is stored as the table that it gave.
    local = trace.mask is not None and trace.mask.is_local()
    spelled = encode([x.comparison, mask, x.bias, mask if local else trace.mask])
    parts = {"q": x.q, "k": x.k, "v": x.v, **trace.rows._asdict(), "sink": x.sink, "seed": x.seed}
    return {
        **{
            part: None if t is None else draft.put(f"{name}/{part}", t) for part, t in parts.items()
        },
        "values": spelled.text,
        "integers": spelled.integers,
        "floats": spelled.floats,
        "tensors": [
            draft.put(f"{name}/value {i}", t, repeated=True) for i, t in enumerate(spelled.tensors)
        ],
        "softcap": None if x.softcap is None else float(x.softcap),
        "dropout": float(x.dropout),
        "rank": x.rank,
        **({"lead": list(x.lead)} if x.lead else {}),
        "backend": trace.backend,
    }


def check_trace(record: Any, stored: Tensors) -> None:
    """Whether a record has the parts of a trace; `restored` sees whether they fit each other."""
    part = dict.fromkeys(("q", "k", "v", *Rows._fields), list)
    more = {"lead": list} if isinstance(record, dict) and "lead" in record else {}
    check_parts(
        record, "a trace", **part, **more, sink=list | None, seed=list | None, values=str,
        integers=list, floats=list, tensors=list, softcap=float | None, dropout=float, rank=int,
        backend=str,
    )  # fmt: skip
    for name in (*part, "sink", "seed"):
        if record[name] is not None:
            place = check_place(record[name], stored)
            if len(place.axes) < len(place.shape):
                full = all(n == 1 or a in place.axes for a, n in enumerate(place.shape))
                expect(full, f"{name} repeats itself", record[name])
    for node in record["tensors"]:
        check_place(node, stored)
    whole = all(type(i) is int and abs(i) <= LARGEST for i in record["integers"])
    expect(whole, "integers", record["integers"])
    expect(all(type(f) is float for f in record["floats"]), "floats", record["floats"])
    text = record["values"]
    expect(len(text) <= LONGEST and _depth(text) <= DEEPEST, "values are too many", text)
    expect(record["backend"] in BACKENDS, "backend", record["backend"])


def restored(record: dict[str, Any], read: Read) -> Trace:
    """A trace from its record, through the checks of a call."""
    part: dict[str, Any] = {
        name: None if record[name] is None else read(Place(*record[name])) for name in PLACES
    }
    tensors = [read(Place(*node)) for node in record["tensors"]]
    spelled = decode(record["values"], record["integers"], record["floats"], tensors)
    expect(len(spelled) == 4, "values", record["values"])
    comparison, mask = _kind(spelled[0], Comparison), _kind(spelled[1], Mask)
    bias, given = _kind(spelled[2], Bias), _kind(spelled[3], Mask)
    if comparison is None:
        raise RegardError("it does not say how queries and keys are compared")
    q = part["q"]
    # A file is read as it was written, under autocast as well.
    here = q.device.type
    with nullcontext() if here == "meta" else torch.autocast(here, enabled=False):
        inputs = check(
            q, part["k"], part["v"], mask=_remade_mask(mask), score=_As(comparison),
            bias=_remade(bias, biases), softcap=record["softcap"], sink=part["sink"], scale=None,
            dropout=record["dropout"], training=False,
        )  # fmt: skip
    seed, rank = part["seed"], record["rank"]
    B, H, Q, _ = inputs.shape
    # An answer with fewer axes is that of the first head.
    lead = tuple(check_lengths(record.get("lead", []), "lead"))
    folded = rank == len(lead) + 3 and len(lead) > 1 and math.prod(lead) == B
    plain = not lead and (rank == 4 or (rank == 3 and H > 0) or (rank == 2 and B * H > 0))
    expect(plain or folded, "rank", rank)
    expect(seed is None or (seed.ndim == 0 and seed.dtype == torch.int64), "seed", seed)
    rows = Rows(*(part[name] for name in Rows._fields))
    for name, t in rows._asdict().items():
        want = (B, H, Q, inputs.v.shape[-1]) if name == "out" else (B, H, Q)
        fits = tuple(t.shape) == want and t.dtype in DTYPES
        expect(fits, f"{name} does not fit", f"{t.dtype} {list(t.shape)} for {list(want)}")
    inputs = replace(inputs, dropout=record["dropout"], seed=seed, rank=rank, lead=lead)
    backend = BACKENDS[record["backend"]]
    # Where the backend cannot run, another answers: any second pass can.
    able = here != "meta" and not backend.refuses(inputs, statistics=True)
    answers = (backend if able else BACKENDS["tiled"]).questions()
    return Trace(inputs, rows, backend.name, answers, _remade_mask(given))


def _written_out(mask: Mask, shape: Shape) -> Mask:
    """A bound mask as files can hold it: a function becomes a table of its pairs."""
    if not mask.is_local():
        return mask
    match mask:
        case And() | Or():
            return type(mask)(_written_out(mask.left, shape), _written_out(mask.right, shape))
        case Not():
            return Not(_written_out(mask.mask, shape))
    size = mask.batch * mask.heads * shape.Q * shape.K
    if not isinstance(mask, BoundWhere) or size > LARGEST_TABLE:
        raise RegardError(
            "a mask made of a function cannot be written to a file: files hold no code, and as a "
            "table it is too large",
            got=f"{mask!r} of {size / 2**20:.0f} MiB",
            accepted=f"tables of up to {LARGEST_TABLE / 2**20:.0f} MiB",
            do="put it together from the masks of regard.masks",
        )
    q, k = (torch.arange(n, device=mask.entries.device) for n in shape[2:])
    return masks.keep(pairs(mask, q, k).contiguous())


class _As(Score):
    """Queries and keys that were prepared before, and how they are compared."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        same_width("a trace", q, k)
        match self.comparison:
            case Dot(scale=number):
                finite_scale(number)
            case Nearness(bandwidth=number):
                positive("bandwidth", number)
            case TanhSum(w=w):
                per_head(w, 1, q.shape[1], "w")
                expect(w.shape[-1] == q.shape[-1] and w.dtype in DTYPES, "w does not fit", w)
        return q, k, self.comparison


def _remade_mask(mask: Mask | None) -> Mask | None:
    """The same mask, made by the functions that check what masks are made of."""
    match mask:
        case And() | Or():
            return type(mask)(_remade_mask(mask.left), _remade_mask(mask.right))  # type: ignore[arg-type]
        case Not():
            return Not(_remade_mask(mask.mask))  # type: ignore[arg-type]
        case Packed():
            return Packed(_remade_mask(mask.mask), mask.queries, mask.keys)
        case BoundGlobalTokens():
            return masks.global_tokens(mask.indices, offset=mask.offset)
    return _remade(mask, masks)


def _remade(value: V | None, makers: object) -> V | None:
    if value is None:
        return None
    parts = dict(zip(value.__match_args__, value._parts(), strict=True))
    named = {name: part for name, part in parts.items() if name in value._keywords}
    plain = [part for name, part in parts.items() if name not in named]
    make: Callable[..., V] = getattr(makers, value._called(), type(value))
    return make(*plain, **named)


def _kind(value: Value | None, kind: type[V]) -> V | None:
    expect(value is None or isinstance(value, kind), f"a {kind.__name__.lower()}", value)
    return value  # type: ignore[return-value]


def check_place(node: Any, stored: Tensors) -> Place:
    """The place of a tensor that is there, and has the axes that are claimed."""
    match node:
        case [str(name), list(shape), list(axes)] if name in stored:
            shape = check_lengths(shape, name)
            if _known(tuple(axes), len(shape)) and stored[name][1] == [shape[a] for a in axes]:
                return Place(name, shape, axes)
    raise RegardError(f"no tensor is where one should be: {shown(node)}")


def _known(axes: tuple[Any, ...], n: int) -> bool:
    """Whether these are some of n axes, each once."""
    try:
        return _known_before(axes, n, tuple(map(type, axes)))
    except TypeError:  # what cannot be told apart is no number
        return False


@lru_cache
def _known_before(axes: tuple[Any, ...], n: int, kinds: tuple[type, ...]) -> bool:
    whole = all(kind is int for kind in kinds) and all(0 <= a < n for a in axes)
    return whole and len(set(axes)) == len(axes)


def check_lengths(shape: list[Any], name: str) -> list[int]:
    """A shape that a tensor can have."""
    size = 1
    for n in shape:
        expect(type(n) is int and n >= 0, name, shape)
        size *= n or 1
    expect(len(shape) <= 8 and size < LARGEST // 8, f"{name!r:.80} is too large", shape)
    return shape


def check_parts(node: Any, what: str, **parts: Any) -> None:
    """Refuse what is not a record of exactly these parts."""
    expect(isinstance(node, dict) and node.keys() == parts.keys(), what, node)
    for name, kind in parts.items():
        part = node[name]
        if not isinstance(part, kind) or isinstance(part, bool):
            expect(False, f"{name} of {what}", part)


def expect(fits: bool, what: str, got: object) -> None:
    """Refuse what does not fit. Whoever opens the file adds which it is, and what to do."""
    if not fits:
        raise RegardError(f"{what}: {shown(got)}")


def shown(got: object) -> str:
    """A short text of anything, however long or deep."""
    return _SHORT.repr(got)


@lru_cache
def _depth(text: str) -> int:
    depth = most = 0
    for c in text:
        depth += (c == "[") - (c == "]")
        most = max(most, depth)
    return most
