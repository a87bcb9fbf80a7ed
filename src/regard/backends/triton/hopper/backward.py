"""The backward pass on Hopper: one warp copies, two groups of warps multiply.

A program owns a tile of keys and their values, each group half of it. The copying warp streams
tiles of queries and of gradients of the output past them. Five products for a tile of pairs: logits
and gradients of weights, then the groups' own gradients of values and keys; and when both have
written the gradients of their logits to shared memory, half the width of the gradients of the
queries each, which the copy engine adds to sums in float32.

For heads of 65 to 128 numbers, masks that numbers tell (a band, limits or runs of keys), ALiBi,
sinks and dropout; no soft-cap, no other bias, no gradient of entropy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from regard.backends.triton.arguments import sheet
from regard.backends.triton.assembly import MARKED_BELOW, UNLESS_MARKED
from regard.backends.triton.gradients.row_numbers import RowNumbers
from regard.backends.triton.hopper.barriers import KEYS_FREE, free, meet, wait_until_free
from regard.backends.triton.hopper.pairs import (
    described,
    fetch,
    keeps,
    queries_of_key_tile,
    slope_of,
    span_of_row,
    words_of,
)
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import FAR
from regard.backends.triton.pairs import ALIBI, LOG2E, Added, Dropping, Score, Sizes
from regard.backends.triton.rules import ALL, BAND, Rule
from regard.inputs import AttentionInputs

WIDTH, QUERIES, KEYS, STAGES = 128, 64, 128, 2
_SUMS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)


@builtin
def _add(where: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    """The copy engine adds a tile to memory. (Gluon of Triton 3.6 has no name for it.)"""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, where.handle, coord, source.handle)


@gluon.jit
def _copy(
    q, g_out, k, v, rows, rule, drop, n, b, g, tile, k_tile, v_tile, q_ring, g_ring, numbers, spans,
    own_full, q_full, g_full, rows_full,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy keys and values, then tiles of queries and gradients as room becomes free, and what is
    known of their rows."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.expect(own_full, k.block_type.nbytes + v.block_type.nbytes)
    fetch(k, [b, g, tile * BN, 0], own_full, k_tile)
    fetch(v, [b, g, tile * BN, 0], own_full, v_tile)
    step = 0
    slot = 0
    for member in range(n.group):
        h = g * n.group + member
        limit, start, _, _, every = queries_of_key_tile(rule, n, b, h, tile, BM, BN)
        for i in range(every):
            row = start + i * BM + gl.arange(0, BM, WARP)
            norm, inverse, shift = _numbers(rows, b, h, row, n)
            first, many = span_of_row(rule, b, h, gl.minimum(row, n.queries - 1), limit)
            wait_until_free(KEYS_FREE + slot, step >= STAGES)
            mbarrier.expect(q_full.index(slot), q.block_type.nbytes)
            fetch(q, [b, h, start + i * BM, 0], q_full.index(slot), q_ring.index(slot))
            mbarrier.expect(g_full.index(slot), g_out.block_type.nbytes)
            fetch(g_out, [b, h, start + i * BM, 0], g_full.index(slot), g_ring.index(slot))
            numbers.index(4 * slot + 0).store(norm)
            numbers.index(4 * slot + 1).store(inverse)
            numbers.index(4 * slot + 2).store(shift)
            if drop.on:
                words = words_of(drop, b, h, row)
                numbers.index(4 * slot + 3).store(words.to(gl.float32, bitcast=True))
            spans.index(2 * slot).store(first)
            spans.index(2 * slot + 1).store(gl.where(row < n.queries, many, 0))
            mbarrier.arrive(rows_full.index(slot), count=1)
            step += 1
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    # No barrier is left with arrivals that nobody met.
    for i in gl.static_range(STAGES):
        wait_until_free(KEYS_FREE + i, step > i)


@gluon.jit
def _numbers(rows, b, h, row, n):
    """The shift of logits, one over the sum, and the shift of gradients of some rows; those past
    the last query get weight 0."""
    at = (b * n.heads + h).to(gl.int64) * n.queries + row
    inside = row < n.queries
    shift = gl.load(rows.shift + at, mask=inside, other=0.0)
    if rows.norm is not None:
        norm = gl.load(rows.norm + at, mask=inside, other=0.0)
        inverse = gl.load(rows.norm + rows.rows + at, mask=inside, other=0.0)
    else:
        norm = gl.load(rows.lse + at, mask=inside, other=float("-inf"))
        norm = gl.where(norm == float("-inf"), float("inf"), norm * LOG2E)
        inverse = gl.full_like(norm, 1.0)
    return norm, inverse, shift


@gluon.jit
def _weights(
    s, slot, numbers, spans, row, key, scoring, bias, slope,
    PARTIAL: gl.constexpr, COLUMN: gl.constexpr,
):  # fmt: skip
    """The weights of pairs, keys as rows; -0 for those that are masked."""
    x = s * (scoring.scale * LOG2E)
    if bias.kind == ALIBI:
        place = (row + bias.offset).to(gl.float32)
        far = gl.abs(gl.expand_dims(key.to(gl.float32), 1) - gl.expand_dims(place, 0))
        x -= slope * far
    p = gl.exp2(x - gl.expand_dims(numbers.index(4 * slot).load(COLUMN), 0))
    p *= gl.expand_dims(numbers.index(4 * slot + 1).load(COLUMN), 0)
    if PARTIAL:
        place = gl.expand_dims(key, 1) - gl.expand_dims(spans.index(2 * slot).load(COLUMN), 0)
        many = gl.expand_dims(spans.index(2 * slot + 1).load(COLUMN), 0)
        p = gl.inline_asm_elementwise(
            MARKED_BELOW, "=f,f,r,r", [p, place, many], gl.float32, True, 1
        )
    return p


@gluon.jit
def _step(
    half, i, step, slot, phase, start, sum_k, sum_v, keys, values, all_keys, q_ring, g_ring,
    numbers, spans, q_full, g_full, rows_full, slopes, staged, sums, scoring, bias, slope, drop, b,
    h, key,
    BM: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL: gl.constexpr, LOGITS: gl.constexpr, PART: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """A tile of queries: its part of the gradients of all."""
    HALF: gl.constexpr = BN // 2
    COLUMN: gl.constexpr = gl.SliceLayout(0, LOGITS)
    row = start + i * BM + gl.arange(0, BM, COLUMN)
    qs = q_ring.index(slot).reshape((BM, BD))
    gs = g_ring.index(slot).reshape((BM, BD))
    nothing = gl.zeros((HALF, BM), gl.float32, LOGITS)
    mbarrier.wait(q_full.index(slot), phase)
    s = warpgroup_mma(keys, qs.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(g_full.index(slot), phase)
    dp = warpgroup_mma(values, gs.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(rows_full.index(slot), phase)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = _weights(s, slot, numbers, spans, row, key, scoring, bias, slope, PARTIAL, COLUMN)
    met = p
    if drop.on:
        words = numbers.index(4 * slot + 3).load(COLUMN).to(gl.uint32, bitcast=True)
        kept = keeps(drop, gl.expand_dims(words, 0), gl.expand_dims(key, 1))
        met = gl.where(kept, p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    sum_v = warpgroup_mma(gl.convert_layout(met.to(qs.dtype), OWN), gs, sum_v, is_async=True)
    if drop.on:
        dp = gl.where(kept, dp * drop.grow, 0.0)
    ds = p * (dp - gl.expand_dims(numbers.index(4 * slot + 2).load(COLUMN), 0))
    if PARTIAL:
        # A masked NaN among the values is in dp.
        ds = gl.inline_asm_elementwise(UNLESS_MARKED, "=f,f,f", [ds, p], gl.float32, True, 1)
    narrow = ds.to(qs.dtype)
    # Two places: who is a step ahead does not write where the other still reads.
    shared = slopes.index(step % 2)
    shared.slice(half * HALF, HALF).store(narrow)
    fence_async_shared()
    meet()
    part = gl.zeros((BM, BD // 2), gl.float32, PART)
    part = warpgroup_mma(shared.permute((1, 0)), all_keys, part, use_acc=False, is_async=True)
    # Under these products the part of the queries is handed over, when the one before it is out
    # of the way.
    sum_k = warpgroup_mma(gl.convert_layout(narrow, OWN), qs, sum_k, is_async=True)
    sum_v, part = warpgroup_mma_wait(1, deps=(sum_v, part))
    tma.store_wait(0)
    staged.index(half).reshape((BM, BD // 2)).store(part)
    fence_async_shared()
    _add(sums, [b, h, start + i * BM, half * (BD // 2)], staged.index(half))
    sum_k = warpgroup_mma_wait(0, deps=(sum_k,))
    free(KEYS_FREE + slot)
    wraps = slot == STAGES - 1
    slot, phase = gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)
    return step + 1, slot, phase, sum_k, sum_v


@gluon.jit
def _multiply(
    half, dk, dv, sums, flags, rule, scoring, bias, drop, n, b, g, tile, k_tile, v_tile, q_ring,
    g_ring, numbers, spans, slopes, staged, spoilt, own_full, q_full, g_full, rows_full,
    D: gl.constexpr, E: gl.constexpr, BD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Half of the keys against all queries that see them."""
    HALF: gl.constexpr = BN // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD // 2, 16])
    OWN: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    keys = k_tile.reshape((BN, BD)).slice(half * HALF, HALF)
    values = v_tile.reshape((BN, BD)).slice(half * HALF, HALF)
    all_keys = k_tile.reshape((BN, BD)).slice(half * (BD // 2), BD // 2, 1)
    key = tile * BN + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LOGITS))
    sum_k = gl.zeros((HALF, BD), gl.float32, SUMS)
    sum_v = gl.zeros((HALF, BD), gl.float32, SUMS)
    step = 0
    slot = 0
    phase = 0
    mbarrier.wait(own_full, 0)
    for member in range(n.group):
        h = g * n.group + member
        slope = slope_of(bias, h)
        _, start, left, full, every = queries_of_key_tile(rule, n, b, h, tile, BM, BN)
        if (tile + 1) * BN > n.keys:
            # Past the last key there are zeros, whose weights may be infinite beside very small
            # logits.
            left, full = every, every
        for i in range(left):
            step, slot, phase, sum_k, sum_v = _step(
                half, i, step, slot, phase, start, sum_k, sum_v, keys, values, all_keys, q_ring,
                g_ring, numbers, spans, q_full, g_full, rows_full, slopes, staged, sums, scoring,
                bias, slope, drop, b, h, key, BM, BN, BD, STAGES, True, LOGITS, PART, OWN,
            )  # fmt: skip
        for i in range(left, full):
            step, slot, phase, sum_k, sum_v = _step(
                half, i, step, slot, phase, start, sum_k, sum_v, keys, values, all_keys, q_ring,
                g_ring, numbers, spans, q_full, g_full, rows_full, slopes, staged, sums, scoring,
                bias, slope, drop, b, h, key, BM, BN, BD, STAGES, False, LOGITS, PART, OWN,
            )  # fmt: skip
        for i in range(full, every):
            step, slot, phase, sum_k, sum_v = _step(
                half, i, step, slot, phase, start, sum_k, sum_v, keys, values, all_keys, q_ring,
                g_ring, numbers, spans, q_full, g_full, rows_full, slopes, staged, sums, scoring,
                bias, slope, drop, b, h, key, BM, BN, BD, STAGES, True, LOGITS, PART, OWN,
            )  # fmt: skip
    sum_k = sum_k * scoring.scale
    if drop.on:
        sum_v = sum_v * drop.grow
    if flags is not None:
        found = gl.max(gl.max((sum_k != sum_k).to(gl.int32), 1), 0)
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        spoilt.index(half).store(gl.zeros((1,), gl.int32, ONE) + found)
        meet()
        if half == 0:
            found = gl.maximum(found, gl.max(spoilt.index(1).load(ONE), 0))
            tiles = (n.keys + BN - 1) // BN
            gl.store(flags + gl.program_id(1) * tiles + tile, found.to(gl.int8))
    row = tile * BN + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
    _store(dk, sum_k, b, g, row, n.keys, D, BD, SUMS)
    _store(dv, sum_v, b, g, row, n.keys, E, BD, SUMS)
    tma.store_wait(0)


@gluon.jit
def _store(
    sheet, t, b, h, row, count, width: gl.constexpr, WIDE: gl.constexpr, LAYOUT: gl.constexpr
):
    column = gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
    at = b.to(gl.int64) * sheet.batch + h.to(gl.int64) * sheet.head + row.to(gl.int64) * sheet.row
    gl.store(
        sheet.ptr + gl.expand_dims(at, 1) + gl.expand_dims(column, 0),
        t.to(sheet.ptr.dtype.element_ty),
        mask=gl.expand_dims(row < count, 1) & gl.expand_dims(column < width, 0),
    )


@launched
@gluon.jit
def all_gradients_on_hopper(
    q, k, v, g_out, sums, dk, dv, rows, flags, rule, bias, scoring, drop, n,
    D: gl.constexpr, E: gl.constexpr, BD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values; and its part of those of queries."""
    tile = gl.program_id(0)
    groups = n.heads // n.group
    b = gl.program_id(1) // groups
    g = gl.program_id(1) % groups
    k_tile = gl.allocate_shared_memory(k.dtype, [1, 1, BN, BD], k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, [1, 1, BN, BD], v.layout)
    q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, BD], q.layout)
    g_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, BD], g_out.layout)
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    slopes = gl.allocate_shared_memory(q.dtype, [2, BN, BM], PLAIN)
    staged = gl.allocate_shared_memory(gl.float32, [2, 1, 1, BM, BD // 2], sums.layout)
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    spoilt = gl.allocate_shared_memory(gl.int32, [2, 1], ONE)
    numbers = gl.allocate_shared_memory(gl.float32, [4 * STAGES, BM], ONE)
    spans = gl.allocate_shared_memory(gl.int32, [2 * STAGES, BM], ONE)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rows_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(rows_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, dk, dv, sums, flags, rule, scoring, bias, drop, n, b, g, tile, k_tile,
                    v_tile, q_ring, g_ring, numbers, spans, slopes, staged, spoilt, own_full,
                    q_full, g_full, rows_full, D, E, BD, BM, BN, STAGES,
                ),
            ),
            (
                _multiply,
                (
                    1, dk, dv, sums, flags, rule, scoring, bias, drop, n, b, g, tile, k_tile,
                    v_tile, q_ring, g_ring, numbers, spans, slopes, staged, spoilt, own_full,
                    q_full, g_full, rows_full, D, E, BD, BM, BN, STAGES,
                ),
            ),
            (
                _copy,
                (
                    q, g_out, k, v, rows, rule, drop, n, b, g, tile, k_tile, v_tile, q_ring, g_ring,
                    numbers, spans, own_full, q_full, g_full, rows_full, BM, BN, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def pull_on_hopper(
    x: AttentionInputs,
    g_out: Tensor,
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
    numbers: RowNumbers,
    flags: Tensor | None,
    rule: Rule,
    call: tuple[Added, Score, Dropping, Sizes],
    grid: tuple[int, int],
) -> None:
    """Gradients of keys and values, and sums of those of queries."""
    if rule.kind is ALL:
        # The widest band. (Triton 3.6 fails to compile such kernels without one.)
        rule = rule._replace(kind=BAND, low=-FAR, high=FAR)
    shape, tile = list(sums.shape), [1, 1, QUERIES, WIDTH // 2]
    all_gradients_on_hopper[grid](
        described(x.q, QUERIES), described(x.k, KEYS), described(x.v, KEYS),
        described(g_out, QUERIES), TensorDescriptor(sums, shape, list(sums.stride()), tile, _SUMS),
        sheet(dk), sheet(dv), numbers, flags, rule, *call,
        D=x.q.shape[-1], E=x.v.shape[-1], BD=WIDTH, BM=QUERIES, BN=KEYS, STAGES=STAGES,
        num_warps=4,
    )  # fmt: skip
