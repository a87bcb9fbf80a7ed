"""The forward pass on Hopper: one warp copies, two groups of warps multiply.

The copying warp fills a ring of key and value tiles in shared memory. Each multiplying group owns
half of the queries; while its products with the values of one tile run, it already has the products
with the next keys under way and takes their softmax. The groups start their products in turns, so
that the powers of one are taken under the products of the other. A program takes tile after tile of
queries, so that keys of the next are copied while the last rows of one are written. In short
sequences a tile has few keys: there the queries of the next tile are copied too, into a second
place, and the copy engine writes the output.

This is the forward pass of masks that numbers tell (a band, limits or runs of keys), with soft-cap,
ALiBi, sinks and dropout, but no other bias. It keeps the same statistics as the general kernel; the
README beside this folder derives the sums.

Where many heads share the keys of one, and each has one query, the heads are the rows of a tile,
and the keys are split over programs, whose sums a second kernel merges.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from regard.backends.triton.arguments import added, dropping, heads_as_rows, score, sheet, sizes
from regard.backends.triton.forward_kernels import Parts
from regard.backends.triton.hopper.barriers import (
    KEYS_FREE,
    MOST_STAGES,
    VALUES_FREE,
    await_turn,
    free,
    give_turn,
    queries_free,
)
from regard.backends.triton.hopper.columns import (
    COLUMNS,
    Beside,
    add_up_rows,
    mix_columns,
    no_columns,
)
from regard.backends.triton.hopper.output import write_part, write_rows
from regard.backends.triton.hopper.pairs import (
    described,
    dropped,
    seen_logits,
    slope_of,
    span_of_row,
    width_on_hopper,
    words_of,
)
from regard.backends.triton.hopper.producer import FACTS, copy_tiles, facts_of, item_of
from regard.backends.triton.hopper.schedule import (
    keys_of_row_tile,
    keys_of_split,
    next_slot,
    place_of,
)
from regard.backends.triton.hopper.softmax import logits, own_sum, shrunk, softmax
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import FAR
from regard.backends.triton.pairs import GOLDEN, LEAST, NO_BIAS, UNSEEN
from regard.backends.triton.rules import ALL, BAND, Rule
from regard.backends.triton.settings.tuning import Forward, processors
from regard.inputs import AttentionInputs


@gluon.jit
def _step(
    half, i, slot, phase, q_tile, k_ring, v_ring, c_ring, k_full, v_full, last, row, first, many,
    scoring, bias, slope, drop, sums, words, p, shrink, mixed, beside, largest, total, energy,
    BD: gl.constexpr, BE: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, STATISTICS: gl.constexpr,
    PARTIAL: gl.constexpr, LOGITS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Products with keys i and with values i - 1 under way together, softmax under the latter and
    under those of the other group, which starts its own when these are all under way.

    Weights come in full precision: halves of registers, carried around a loop, are taken apart and
    put together again in each turn. That the next values are there is asked before the products
    are waited for: left to itself the compiler would wait for those ahead of all powers, but not
    ahead of a branch.
    """
    before = slot
    slot, phase = next_slot(slot, phase, STAGES)
    mbarrier.wait(k_full.index(slot), phase)
    await_turn(half)
    s = gl.zeros((HALF, BN), gl.float32, LOGITS)
    keys = k_ring.index(slot).reshape((BN, BD)).permute((1, 0))
    s = warpgroup_mma(q_tile, keys, s, use_acc=False, is_async=True)
    mixed = shrunk(mixed, shrink)
    weights = gl.convert_layout(p.to(q_tile.dtype), WEIGHTS)
    values = v_ring.index(before).reshape((BN, BE))
    mixed = warpgroup_mma(weights, values, mixed, is_async=True)
    if sums is None:
        give_turn(half)
        s = warpgroup_mma_wait(1, deps=(s,))
    else:
        beside = mix_columns(p.to(q_tile.dtype), c_ring.index(before), shrink, beside, BN)
        give_turn(half)
        s = warpgroup_mma_wait(2, deps=(s,))
    free(KEYS_FREE + slot)
    s, scale = logits(s, scoring, bias, slope, last - i * BN, row, BN, LOGITS)
    if PARTIAL:
        s = seen_logits(s, last - i * BN, first, many, BN, LOGITS)
    p, shrink, largest, total, energy = softmax(
        s, scale, largest, total, energy, STATISTICS, PARTIAL, LOGITS
    )
    p = dropped(p, drop, words, last - i * BN, BN, LOGITS)
    mbarrier.wait(v_full.index(slot), phase)
    if sums is None:
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
    else:
        mixed, beside = warpgroup_mma_wait(0, deps=(mixed, beside))
    free(VALUES_FREE + before)
    return slot, phase, p, shrink, mixed, beside, largest, total, energy


@gluon.jit
def _multiply(
    half, out, sent, staged, to, parts, flags, rule, scoring, bias, sink, drop, n, items, splits,
    rows, sums, facts, q_tiles, k_ring, v_ring, c_ring, q_full, k_full, v_full,
    E: gl.constexpr, BD: gl.constexpr, BE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, PLACES: gl.constexpr, STATISTICS: gl.constexpr,
):  # fmt: skip
    """Half of the queries of tile after tile, each against all its keys."""
    HALF: gl.constexpr = BM // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    slot = 0
    phase = 0
    turn = 0
    # The first group starts.
    if half == 1:
        give_turn(half)
    mbarrier.wait(q_full.index(0), 0)
    item = item_of(facts, 0)
    while item < items:
        if BD > 64:
            tile, b, h, split, limit, last, right, full, every = facts_of(facts, turn % PLACES)
        else:
            # With numbers from memory the compiler orders the loop of narrow heads worse.
            tile, b, h, split = place_of(item, n, splits, BM)
            limit, last, right, full, every = keys_of_row_tile(
                rule, n, b, h, tile, split, splits, BM, BN
            )
        q_tile = q_tiles.index(turn % PLACES * 2 + half).reshape((HALF, BD))
        slope = slope_of(bias, h)
        row = tile * BM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LOGITS))

        if splits is not None:
            start, stop = keys_of_split(n, split, splits, BN)
            first, many = gl.full_like(row, 0) + start, gl.full_like(row, 0) + (stop - start)
        else:
            first, many = span_of_row(rule, b, h, row, limit)
        words = row
        if drop.on:
            words = words_of(drop, b, h, row) + GOLDEN
        largest = gl.full((HALF,), LEAST, gl.float32, gl.SliceLayout(1, LOGITS))
        if bias.kind == NO_BIAS:
            some = (many > 0) & (first + many > 0)
            largest = gl.where(some, gl.full_like(largest, UNSEEN), largest)
        total = own_sum(gl.zeros((HALF, BN), gl.float32, LOGITS))
        energy = total
        mixed = gl.zeros((HALF, BE), gl.float32, OUTPUT)
        beside = total
        if sums is not None:
            beside = no_columns(HALF)

        mbarrier.wait(k_full.index(slot), phase)
        s = gl.zeros((HALF, BN), gl.float32, LOGITS)
        keys = k_ring.index(slot).reshape((BN, BD)).permute((1, 0))
        s = warpgroup_mma(q_tile, keys, s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        free(KEYS_FREE + slot)
        s, scale = logits(s, scoring, bias, slope, last, row, BN, LOGITS)
        s = seen_logits(s, last, first, many, BN, LOGITS)
        p, shrink, largest, total, energy = softmax(
            s, scale, largest, total, energy, STATISTICS, True, LOGITS
        )
        p = dropped(p, drop, words, last, BN, LOGITS)
        mbarrier.wait(v_full.index(slot), phase)

        for i in range(1, right):
            slot, phase, p, shrink, mixed, beside, largest, total, energy = _step(
                half, i, slot, phase, q_tile, k_ring, v_ring, c_ring, k_full, v_full, last, row,
                first, many, scoring, bias, slope, drop, sums, words, p, shrink, mixed, beside,
                largest, total, energy, BD, BE, HALF, BN, STAGES, STATISTICS, True, LOGITS, WEIGHTS,
            )  # fmt: skip
        for i in range(gl.maximum(right, 1), full):
            slot, phase, p, shrink, mixed, beside, largest, total, energy = _step(
                half, i, slot, phase, q_tile, k_ring, v_ring, c_ring, k_full, v_full, last, row,
                first, many, scoring, bias, slope, drop, sums, words, p, shrink, mixed, beside,
                largest, total, energy, BD, BE, HALF, BN, STAGES, STATISTICS, False, LOGITS,
                WEIGHTS,
            )  # fmt: skip
        for i in range(gl.maximum(full, 1), every):
            slot, phase, p, shrink, mixed, beside, largest, total, energy = _step(
                half, i, slot, phase, q_tile, k_ring, v_ring, c_ring, k_full, v_full, last, row,
                first, many, scoring, bias, slope, drop, sums, words, p, shrink, mixed, beside,
                largest, total, energy, BD, BE, HALF, BN, STAGES, STATISTICS, True, LOGITS, WEIGHTS,
            )  # fmt: skip

        free(queries_free(turn % PLACES))
        mixed = shrunk(mixed, shrink)
        weights = gl.convert_layout(p.to(q_tile.dtype), WEIGHTS)
        values = v_ring.index(slot).reshape((BN, BE))
        mixed = warpgroup_mma(weights, values, mixed, is_async=True)
        if sums is None:
            mixed = warpgroup_mma_wait(0, deps=(mixed,))
        else:
            beside = mix_columns(p.to(q_tile.dtype), c_ring.index(slot), shrink, beside, BN)
            mixed, beside = warpgroup_mma_wait(0, deps=(mixed, beside))
            add_up_rows(half, tile, b, h, n, beside, sums, BM)
        free(VALUES_FREE + slot)
        slot, phase = next_slot(slot, phase, STAGES)

        if drop.on:
            mixed = mixed * drop.grow
        if splits is not None:
            write_part(
                half, tile, b, h, split, splits, parts, n, rows, mixed, largest, total, energy,
                E, BE, BM, STATISTICS, LOGITS, OUTPUT,
            )  # fmt: skip
        else:
            write_rows(
                half, tile, b, h, out, sent, staged, to, flags, sink, n, rows, mixed, largest,
                total, energy, E, BE, BM, STATISTICS, LOGITS, OUTPUT,
            )  # fmt: skip
        turn += 1
        mbarrier.wait(q_full.index(turn % PLACES), (turn // PLACES) & 1)
        item = item_of(facts, turn % PLACES)
    if half == 0:
        await_turn(half)
    if sent is not None:
        tma.store_wait(0)


@launched
@gluon.jit(do_not_specialize=["items", "splits", "rows"])
def forward_on_hopper(
    q, k, v, c, out, sent, to, parts, sums, taken, flags, rule, scoring, bias, sink, drop, n, items,
    splits, rows,
    E: gl.constexpr, BD: gl.constexpr, BE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, PLACES: gl.constexpr, STATISTICS: gl.constexpr,
):  # fmt: skip
    """Tiles of queries against their keys; `taken` and `flags` start at 0. Without `taken` there is
    a program for each tile. With `sent`, a map of the output, the copy engine writes it. With
    `splits`, sums of each are written to `parts`. With `c`, columns of numbers beside the values,
    what each tile's rows have of them is written to `sums`."""
    # Values are asked for before the last ones are free, so one slot would wait for itself.
    gl.static_assert(STAGES >= 2)
    gl.static_assert(STAGES <= MOST_STAGES)
    gl.static_assert(PLACES <= 2)
    HALF: gl.constexpr = BM // 2
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    facts = gl.allocate_shared_memory(gl.int32, [PLACES * FACTS, 1], ONE)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2 * PLACES, 1, 1, HALF, BD], q.layout)
    k_ring = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, BD], k.layout)
    v_ring = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BN, BE], v.layout)
    c_ring = v_ring
    if c is not None:
        c_ring = gl.allocate_shared_memory(c.dtype, [STAGES, 1, 1, BN, COLUMNS], c.layout)
    staged = q_tiles
    if sent is not None:
        staged = gl.allocate_shared_memory(sent.dtype, [2, 1, 1, HALF, BE], sent.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, out, sent, staged, to, parts, flags, rule, scoring, bias, sink, drop, n,
                    items, splits, rows, sums, facts, q_tiles, k_ring, v_ring, c_ring, q_full,
                    k_full, v_full, E, BD, BE, BM, BN, STAGES, PLACES, STATISTICS,
                ),
            ),
            (
                _multiply,
                (
                    1, out, sent, staged, to, parts, flags, rule, scoring, bias, sink, drop, n,
                    items, splits, rows, sums, facts, q_tiles, k_ring, v_ring, c_ring, q_full,
                    k_full, v_full, E, BD, BE, BM, BN, STAGES, PLACES, STATISTICS,
                ),
            ),
            (
                copy_tiles,
                (
                    q, k, v, c, rule, n, items, splits, taken, facts, q_tiles, k_ring, v_ring,
                    c_ring, q_full, k_full, v_full, BM, BN, STAGES, PLACES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def run_on_hopper(
    x: AttentionInputs,
    out: Tensor,
    to: Any,
    parts: Parts,
    taken: Tensor | None,
    flags: Tensor | None,
    rule: Rule,
    items: int,
    how: Forward,
    *,
    statistics: bool,
    beside: Beside | None = None,
) -> None:
    """The forward pass of a call that `fits_hopper`, written to `out` and `to`, or to `parts`."""
    if rule.kind is ALL:
        # Compiled for all pairs, what is hidden in the last tile of keys is the same for all tiles
        # of queries: the compiler keeps it through all of them, and too few registers are left.
        rule = rule._replace(kind=BAND, low=-FAR, high=FAR)
    q, n, splits = x.q, sizes(x), None
    if how.splits > 1:
        q, splits = heads_as_rows(x), how.splits
        n = n._replace(queries=q.shape[2], heads=q.shape[1], group=1)
    forward_on_hopper[(min(items, processors(x.q.device)),)](
        described(x.q, how.rows // 2, seen_as=q), described(x.k, how.keys),
        described(x.v, how.keys), None if beside is None else beside.described(how.keys),
        sheet(out), described(out, how.rows // 2) if how.queued else None, to, parts,
        None if beside is None else beside.sums, taken, flags, rule,
        score(x), added(x), x.sink, dropping(x), n, items, splits, to.lse.numel(),
        E=x.v.shape[-1], BD=width_on_hopper(x.q), BE=width_on_hopper(x.v), BM=how.rows,
        BN=how.keys, STAGES=how.stages, PLACES=2 if how.queued else 1, STATISTICS=statistics,
        num_warps=4,
    )  # fmt: skip
