"""The end of a tile of queries: its output and statistics are written."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from regard.backends.triton.forward_kernels import finished
from regard.backends.triton.hopper.pairs import send
from regard.backends.triton.hopper.softmax import own_sum, whole_sum
from regard.backends.triton.pairs import LEAST, LN2, LOG2E

_finished = gluon.jit(finished.fn)


@gluon.jit
def write_rows(
    half, tile, b, h, out, sent, staged, to, flags, sink, n, rows, mixed, largest, total, energy,
    E: gl.constexpr, BE: gl.constexpr, BM: gl.constexpr, STATISTICS: gl.constexpr,
    LOGITS: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Output and statistics of a group's rows, and a flag where the output has NaN. What the copy
    engine takes is ready first: it waits for all that was written before."""
    HALF: gl.constexpr = BM // 2
    tiles = (n.queries + BM - 1) // BM
    row = tile * BM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LOGITS))
    total = whole_sum(total, LOGITS)
    at = (b * n.heads + h).to(gl.int64) * n.queries + row
    inside = row < n.queries
    shift = largest
    if sink is None:
        # Further from its rounded maximum than exp2 reaches: NaN, as in forward_kernels.py.
        total = gl.where((total == 0) & (largest > LEAST), float("nan"), total)
        unseen = total == 0
        whole = gl.where(unseen, 1.0, total)
        lse = gl.where(unseen, float("-inf"), (largest + gl.log2(whole)) * LN2)
        inverse = 1.0 / whole
        over = inverse
        if STATISTICS:
            seen = gl.where(unseen, float("-inf"), largest * LN2)
            seen = gl.where(total == total, seen, total)
            energy = whole_sum(energy, LOGITS)
            entropy = gl.where(unseen, 0.0, gl.log2(whole) - energy / whole) * LN2
    else:
        lone = gl.zeros_like(total) + gl.load(sink + h).to(gl.float32) * LOG2E
        energy = whole_sum(energy, LOGITS)
        inverse, lse, seen, entropy, shift, over = _finished(largest, total, energy, lone)
    mixed = mixed * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT)), 1)
    if sent is None:
        place = tile * BM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, OUTPUT))
        column = gl.arange(0, BE, gl.SliceLayout(0, OUTPUT))
        to_row = b.to(gl.int64) * out.batch + h.to(gl.int64) * out.head
        to_row += place.to(gl.int64) * out.row
        gl.store(
            out.ptr + gl.expand_dims(to_row, 1) + gl.expand_dims(column, 0),
            mixed.to(out.ptr.dtype.element_ty),
            mask=_inside(place < n.queries, column, E, BE),
        )
    else:
        # The rows before are out of the way.
        tma.store_wait(0)
        staged.index(half).reshape((HALF, BE)).store(mixed.to(sent.dtype))
        fence_async_shared()
        send(sent, [b, h, tile * BM + half * HALF, 0], staged.index(half))
    gl.store(to.lse + at, lse, mask=inside)
    gl.store(to.norm + at, shift, mask=inside)
    gl.store(to.norm + rows + at, over, mask=inside)
    if STATISTICS:
        gl.store(to.largest + at, seen, mask=inside)
        gl.store(to.entropy + at, entropy, mask=inside)
    if flags is not None:
        # Each thread flags its own numbers: NaN stays in a sum.
        own = own_sum(mixed)
        flag = flags + (b * n.heads + h) * tiles + tile + gl.zeros_like(own).to(gl.int32)
        gl.store(flag, gl.full_like(own, 1).to(gl.int32), mask=own != own)


@gluon.jit
def write_part(
    half, tile, b, h, split, splits, parts, n, rows, mixed, largest, total, energy,
    E: gl.constexpr, BE: gl.constexpr, BM: gl.constexpr, STATISTICS: gl.constexpr,
    LOGITS: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """The sums of a group's rows over one split of the keys."""
    HALF: gl.constexpr = BM // 2
    row = tile * BM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LOGITS))
    start = split.to(gl.int64) * rows + (b * n.heads + h) * n.queries
    inside = row < n.queries
    gl.store(parts.sums + start + row, largest, mask=inside)
    gl.store(parts.sums + splits * rows + start + row, whole_sum(total, LOGITS), mask=inside)
    if STATISTICS:
        energy = whole_sum(energy, LOGITS)
        gl.store(parts.sums + 2 * splits * rows + start + row, energy, mask=inside)
    place = tile * BM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, OUTPUT))
    column = gl.arange(0, BE, gl.SliceLayout(0, OUTPUT))
    gl.store(
        parts.mixed + gl.expand_dims((start + place) * E, 1) + gl.expand_dims(column, 0),
        mixed,
        mask=_inside(place < n.queries, column, E, BE),
    )


@gluon.jit
def _inside(rows, column, E: gl.constexpr, BE: gl.constexpr):
    """Which numbers of a tile there is memory for."""
    if E == BE:
        return gl.expand_dims(rows, 1)
    else:
        return gl.expand_dims(rows, 1) & gl.expand_dims(column < E, 0)
