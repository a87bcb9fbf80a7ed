"""Plain calls that come again: all that calls of a kind share is made ready once, and each of them
needs no more than memory of its own and the addresses of its tensors."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends.contract import Repeated, Rows, Tabled, table_step
from regard.backends.tiled.call_memory import borrow, empty, give_back
from regard.backends.tiled.fused import described, fusing
from regard.backends.tiled.laid_bias import NO_BIAS, LaidBias
from regard.backends.tiled.loop import AGAIN, Attend, Loop, inner_loop
from regard.backends.tiled.pieces import Lot, Packed, lots, pieces
from regard.backends.tiled.plan import Plan, Product
from regard.backends.tiled.tiles import grouped, takes_all
from regard.cancellation import step
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask, pairs
from regard.transforms import recorded

_FLOAT = torch.float32.itemsize
_LINE = 64
"""Bytes in a line of the cache."""


class Kind(NamedTuple):
    """What calls of one kind share, as C takes it."""

    loop: Loop
    plan: Plan
    parts: list[tuple[Lot, Attend, int]]
    """Lots of row tiles, and for each the structure that tells of all calls, with its address. What
    tables of a mask point to is held with the lot."""
    size: int
    """Bytes of memory that a call takes while it runs."""
    packed: bool
    copied: bool
    """Whether narrow numbers, which this CPU cannot multiply, are copied first."""

    @property
    def is_usable(self) -> bool:
        """Whether the loop is still the one that runs such calls."""
        return inner_loop.found()[0] is self.loop and not recorded()


def kind_of(x: AttentionInputs) -> Kind | None:
    """The kind of a call that can run as a whole in C, but for its bias; None where each must be
    looked at."""
    loop = fusing(x)
    if loop is None or x.sink is not None:
        return None
    plan = Plan.of(x, loop)
    if plan.band is None and not takes_all(x, plan.rows):
        # Tables of what a mask hides may be large.
        return None
    piece, *others = pieces(x, plan, wide=not plan.narrow)
    copied = x.q.dtype != torch.float32 and not plan.narrow
    as_multiplied = [t.to(torch.float32) if copied else t for t in (x.q, x.k, x.v)]
    if others or not all(map(_lies_like, (piece.q, piece.k, piece.v), as_multiplied)):
        # Rows must be put side by side first, or some heads after others.
        return None
    packed = Packed.of(piece, plan, backward=False)
    scratch = x.v.new_empty(plan.scratch, dtype=torch.float32)
    fields = described(x, loop, piece, plan, scratch, packed)
    fields["whole_heads"] = plan.whole_heads(piece.heads_of_keys)
    places, size = _places(plan, packed)
    parts = [(lot, *_filled(fields | places, lot)) for lot in lots(piece, plan)]
    return Kind(loop, plan, parts, size, packed is not None, copied)


def prepared(x: AttentionInputs, plainly: Repeated, *, statistics: bool) -> Repeated | None:
    """How calls of this one's kind run, if nothing is learned; None where each of them must be
    looked at. `plainly` runs those in which a masked value may have done harm."""
    kind = None if x.needs_grad or x.bias is not None else kind_of(x)
    if kind is None:
        return None
    attend = _attending(kind, x.q.dtype, statistics=statistics)

    def again(q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        found = attend(q, k, v, 0, NO_BIAS)
        return plainly(q, k, v) if found is None else found

    return again


def prepared_to_bind(
    x: AttentionInputs, plainly: Callable[[AttentionInputs], Rows | Tensor], *, statistics: bool
) -> Callable[[AttentionInputs], Rows | Tensor] | None:
    """The same for calls of which each has a mask and a bias with other numbers; None where each
    must be looked at."""
    kind = None if x.needs_grad else kind_of(x)
    if kind is None:
        return None
    hiding = None
    if kind.plan.band is None:
        hiding = _hiding(kind)
        if hiding is None:
            return None
    attend, biased = _attending(kind, x.q.dtype, statistics=statistics), x.bias is not None

    def again(x: AttentionInputs) -> Rows | Tensor:
        # Both are held until the call is over.
        hidden = None if hiding is None else hiding(x.mask)
        bias = LaidBias.of(x)
        if (bias is None) is biased:
            return plainly(x)
        parts = 0 if hidden is None else hidden.parts.buffer_info()[0]
        added = NO_BIAS if bias is None else (bias.address(), *bias.steps)
        found = attend(x.q, x.k, x.v, parts, added)
        return plainly(x) if found is None else found

    return again


class Hidden(NamedTuple):
    """What a mask hides, and the table that tells C of it."""

    pairs: Tensor
    parts: array[int]


def _hiding(kind: Kind) -> Callable[[Mask | None], Hidden] | None:
    """A function that gives what a mask hides; None where there is more than one tile of queries,
    or a cut of it."""
    if len(kind.parts) != 1:
        return None
    ((lot, _, _),), plan = kind.parts, kind.plan
    assert lot.tables is not None
    cuts = list(zip(*[iter(lot.tables[1])] * 4, strict=True))
    if [cut[2:] for cut in cuts] != [(i, i + 1) for i in range(len(cuts))]:
        return None
    if cuts[0][0] != 0 or cuts[-1][1] != plan.K:
        return None
    queries, keys = torch.arange(plan.Q), torch.arange(plan.K)
    axes = plan.B, plan.G, plan.group

    def hiding(mask: Mask | None) -> Hidden:
        assert mask is not None
        hidden = grouped(~pairs(mask, queries, keys), plan.group).contiguous()
        *strides, _ = hidden.expand(*axes, -1, -1).stride()
        table, parts = hidden.data_ptr(), array("l")
        for start, stop, *_ in cuts:
            parts.extend((0, stop - start, table + start, *strides))
        return Hidden(hidden, parts)

    return hiding


def _attending(
    kind: Kind, dtype: torch.dtype, *, statistics: bool
) -> Callable[[Tensor, Tensor, Tensor, int, tuple[int, ...]], Rows | Tensor | None]:
    """A function that runs a call from its tensors, the address of what its mask hides, or 0, and
    where its bias lies. It gives None where the call must be run plainly."""
    loop, plan = kind.loop, kind.plan
    B, H, Q, E, threads = plan.B, plan.H, plan.Q, plan.E, plan.threads
    parts, size, copied, is_packed = kind.parts, kind.size, kind.copied, kind.packed
    tiles = -(-Q // plan.rows)
    out_like = (B, H, Q, E), (H * Q * E, Q * E, E, 1), dtype if plan.narrow else torch.float32
    step_of_table = table_step(B * H * Q, _FLOAT)
    apart = step_of_table * _FLOAT
    table_like = (3, B, H, Q), (step_of_table, H * Q, Q, 1), torch.float32
    narrow, multiplied_by = plan.narrow, _narrow_product(plan, loop)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, hidden: int, bias: tuple[int, ...]
    ) -> Rows | Tensor | None:
        if not kind.is_usable:
            return None
        # oneDNN can be switched off between calls.
        if is_packed and not torch._C._get_mkldnn_enabled():
            return None
        if narrow and _narrow_product(plan, loop) != multiplied_by:
            return None
        # Held until the call is over.
        a, b, c = (t.to(torch.float32) for t in (q, k, v)) if copied else (q, k, v)
        out = empty(*out_like)
        table, largest, entropy, lse = None, 0, 0, 0
        if statistics:
            table = empty(*table_like)
            largest = table.data_ptr()
            entropy, lse = largest + apart, largest + 2 * apart
        memory = borrow(size)
        given = (
            a.data_ptr(), b.data_ptr(), c.data_ptr(), out.data_ptr(), largest, entropy, lse, 0,
            memory.address, hidden, *bias, threads,
        )  # fmt: skip
        for lot, _, shared in parts:
            step(lot.first, tiles)
            if not loop.attend_again(AGAIN.pack(shared, *given)):
                return None
        give_back(memory, size)
        out = out.to(dtype) if copied else out
        return out if table is None else Tabled(out, table)

    return attend


def _places(plan: Plan, packed: Packed | None) -> tuple[dict[str, int], int]:
    """Where in the memory of a call each thing lies, and how much of it there is: scratch memory,
    and packed matrices."""
    sizes = {"scratch": plan.scratch * _FLOAT}
    if packed is not None:
        sizes |= {name: t.nbytes for name, t in packed.memory.items()}
    places, size = {}, 0
    for name, n in sizes.items():
        places[name] = size
        size += -(-n // _LINE) * _LINE
    return places, size


def _filled(fields: dict[str, Any], lot: Lot) -> tuple[Attend, int]:
    """The structure that tells of a lot, and its address."""
    shared = Attend(**fields)
    lot.put(shared)
    return shared, ctypes.addressof(shared)


def _narrow_product(plan: Plan, loop: Loop) -> int | None:
    """Where that is which multiplies narrow matrices."""
    by_type = loop.multiply_packed if plan.product is Product.PACKED else loop.multiply_halves
    return by_type.get(plan.dtype)


def _lies_like(part: Tensor, whole: Tensor) -> bool:
    """Whether rows of a tensor were taken as they lie, and all of them."""
    return part.shape == whole.shape and part.stride() == whole.stride()
