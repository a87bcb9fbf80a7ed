"""What the compiled loop works through: pieces of a call, in lots of row tiles."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.tiled.loop import Attend, Pull
from regard.backends.tiled.plan import Plan, Product, even
from regard.backends.tiled.tiles import Cut, Slab, slabs, spans
from regard.inputs import AttentionInputs

HELD = 1 << 22
"""Bytes of masks after which a lot of row tiles ends, if it keeps all threads busy."""
LOT = 1 << 33
"""Multiplications per thread after which a lot ends, so that Ctrl-C is heard within a second."""

_EVERYTHING = slice(None)


class Piece(NamedTuple):
    """Some batch entries and heads, in float32 or as they were given; with the slab that knows
    their mask, if it is no band."""

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]
    batch: slice
    heads: slice
    key_heads: slice
    slab: Slab | None
    halves: tuple[Tensor, Tensor, Tensor] | None
    """q, k and v as they were given, if such matrices are multiplied."""

    @property
    def heads_of_keys(self) -> int:
        return self.k.shape[0] * self.k.shape[1]

    def address(self, t: Float[Tensor, "b h q *rest"]) -> int:
        """Where this piece begins in a contiguous tensor of rows."""
        batch, head = self.batch.start or 0, self.heads.start or 0
        return t.data_ptr() + (batch * t.stride(0) + head * t.stride(1)) * t.element_size()


class Packed(NamedTuple):
    """Memory for the packed keys and values of a piece, by the names of call.h."""

    memory: dict[str, Tensor]

    @classmethod
    def of(cls, piece: Piece, plan: Plan, *, backward: bool) -> Packed | None:
        if plan.product is not Product.PACKED:
            return None
        widths = {"k_packed": even(plan.D)}
        if not backward:
            widths |= {"v_packed": plan.E}
        elif plan.narrow_backward:
            widths |= {"k_mixed": plan.D, "v_compared": even(plan.E)}
        heads = piece.heads_of_keys
        if not backward:
            heads = plan.packed_heads(heads)
        assert piece.halves is not None
        given = piece.halves[1]
        return cls({name: given.new_empty(heads * plan.runs * n) for name, n in widths.items()})


def pieces(x: AttentionInputs, plan: Plan, *, wide: bool = True) -> Iterator[Piece]:
    """Without `wide` nothing is made float32."""
    if plan.band is None:
        for slab in slabs(x, plan.size, is_finite=True):
            given = _all_rows(slab.x.q, slab.x.k, slab.x.v) if plan.narrow else None
            parts = _all_rows(slab.q.flatten(1, 2), slab.k, slab.v) if wide else given
            assert parts is not None
            yield Piece(*parts, slab.batch, slab.heads, slab.key_heads, slab, given)
        return
    if x.q.dtype == torch.float32 or not wide:
        parts = _all_rows(x.q, x.k, x.v)
        everything = (_EVERYTHING, _EVERYTHING, _EVERYTHING)
        yield Piece(*parts, *everything, None, parts if plan.narrow else None)
        return
    for batch, key_heads in spans(x, plan.size):
        heads = slice(key_heads.start * plan.group, key_heads.stop * plan.group)
        part = (x.q[batch, heads], x.k[batch, key_heads], x.v[batch, key_heads])
        given = _all_rows(*part) if plan.narrow else None
        parts = _all_rows(*(t.to(torch.float32) for t in part))
        yield Piece(*parts, batch, heads, key_heads, None, given)


def _all_rows(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = map(in_rows, tensors)
    return q, k, v


class Lot(NamedTuple):
    """Row tiles to work through in one go; for masks that are no band with tables of their cuts."""

    first: int
    last: int
    tables: tuple[array[int], array[int], array[int]] | None = None
    held: tuple[object, ...] = ()
    """What the tables point to."""

    def put(self, call: Attend | Pull) -> None:
        call.first_tile, call.last_tile = self.first, self.last
        if self.tables is not None:
            call.tiles, call.cuts, call.parts = (t.buffer_info()[0] for t in self.tables)


def lots(piece: Piece, plan: Plan) -> Iterator[Lot]:
    heads = piece.q.shape[0] * piece.q.shape[1]
    width = plan.D + plan.E
    if piece.slab is None:
        tiles = -(-plan.Q // plan.rows)
        work = heads * min(plan.rows, plan.Q) * plan.K * width
        step = max(1, LOT * plan.threads // work)
        for first in range(0, tiles, step):
            yield Lot(first, min(first + step, tiles))
        return
    lot: list[tuple[slice, list[Cut]]] = []
    first = held = work = 0
    for rows, cuts in piece.slab.rows():
        lot.append((rows, cuts))
        held += sum(hidden.numel() for cut in cuts for _, hidden in cut.partial)
        work += heads * plan.rows * width * sum(cut.keys.stop - cut.keys.start for cut in cuts)
        busy = len(lot) * heads >= 4 * plan.threads
        if (held > HELD and busy) or work > LOT * plan.threads:
            yield _tabled(first, lot, piece.slab)
            first, lot, held, work = first + len(lot), [], 0, 0
    if lot:
        yield _tabled(first, lot, piece.slab)


def _tabled(first: int, lot: list[tuple[slice, list[Cut]]], slab: Slab) -> Lot:
    tiles, cuts, parts = array("l"), array("l"), array("l")
    axes = (*slab.x.k.shape[:2], slab.x.group)
    for rows, looked_at in lot:
        before = len(cuts) // 4
        for cut in looked_at:
            part = len(parts) // 7
            for keys, hidden in cut.partial:
                *strides, _ = hidden.expand(*axes, -1, -1).stride()
                parts.extend((keys.start, keys.stop, hidden.data_ptr(), *strides))
            cuts.extend((cut.keys.start, cut.keys.stop, part, len(parts) // 7))
        tiles.extend((rows.start, rows.stop, before, len(cuts) // 4))
    return Lot(first, first + len(lot), (tiles, cuts, parts), (lot,))


def in_rows(t: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
    """Entries of a row lie side by side, and rows do not overlap, as matrix products want it."""
    n, d = t.shape[2:]
    side_by_side = d == 1 or t.stride(3) == 1
    apart = n == 1 or d <= t.stride(2) < 2**31
    return t if side_by_side and apart else t.clone(memory_format=torch.contiguous_format)
