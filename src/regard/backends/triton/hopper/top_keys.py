"""The strongest keys of each query, on Hopper: one warp copies, two groups of warps multiply.

A program owns a tile of queries, each group half of them. The copying warp streams the keys past
them twice, and while one group compares, the products of the other run. What the two passes do is
told in `questions/top_keys.py`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from regard.backends.contract import Top
from regard.backends.triton.arguments import sizes, tiles_of
from regard.backends.triton.hopper.pairs import (
    described,
    fetch,
    seen_logits,
    span_of_row,
    width_on_hopper,
)
from regard.backends.triton.hopper.schedule import keys_of_row_tile
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import FAR, rule_of
from regard.backends.triton.pairs import LOG2E
from regard.backends.triton.rules import ALL, BAND
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot

QUERIES, KEYS, STAGES = 128, 128, 4
MOST = 16
"""Keys of a list that registers hold beside all else."""
_BEYOND = gl.constexpr(2**31 - 1)
"""No key."""


@gluon.jit
def _copy(
    q, k, rule, n, b, h, tile, q_tiles, k_ring, q_full, k_full, k_free,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the queries, then all tiles of keys, twice, as room becomes free."""
    HALF: gl.constexpr = BM // 2
    _, last, _, _, every = keys_of_row_tile(rule, n, b, h, tile, 0, None, BM, BN)
    mbarrier.expect(q_full, 2 * q.block_type.nbytes)
    fetch(q, [b, h, tile * BM, 0], q_full, q_tiles.index(0))
    fetch(q, [b, h, tile * BM + HALF, 0], q_full, q_tiles.index(1))
    for step in range(2 * every):
        slot = step % STAGES
        i = gl.where(step < every, step, step - every)
        mbarrier.wait(k_free.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
        fetch(k, [b, h // n.group, last - i * BN, 0], k_full.index(slot), k_ring.index(slot))


@gluon.jit
def _products(
    step, start, queries, first, many, k_ring, k_full, k_free,
    D: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL: gl.constexpr, LOGITS: gl.constexpr,
):  # fmt: skip
    """Products with a tile of keys, in the order of the logits; minus infinity where masked."""
    slot = step % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    s = gl.zeros((HALF, BN), gl.float32, LOGITS)
    keys = k_ring.index(slot).reshape((BN, D)).permute((1, 0))
    s = warpgroup_mma(queries, keys, s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(slot))
    if PARTIAL:
        s = seen_logits(s, start, first, many, BN, LOGITS)
    return s


@gluon.jit
def _compared(
    i, last, high, since, queries, first, many, k_ring, k_full, k_free,
    D: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL: gl.constexpr, LOGITS: gl.constexpr,
):  # fmt: skip
    """The largest of each column, and in which tile it stood. Tiles come from the last to the
    first: among equal ones the later to come is the earlier key."""
    start = last - i * BN
    s = _products(
        i, start, queries, first, many, k_ring, k_full, k_free, D, HALF, BN, STAGES, PARTIAL, LOGITS
    )
    higher = s >= high
    return gl.where(higher, s, high), gl.where(higher, start, since)


@gluon.jit
def _taken(
    i, every, last, best, where, since, weakest, wanted, queries, first, many, k_ring, k_full,
    k_free,
    D: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, BT: gl.constexpr,
    STAGES: gl.constexpr, PARTIAL: gl.constexpr, LOGITS: gl.constexpr, LISTS: gl.constexpr,
):  # fmt: skip
    """The list of each query with what it lacks of a tile, and the weakest in it."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    start = last - i * BN
    s = _products(
        every + i, start, queries, first, many, k_ring, k_full, k_free, D, HALF, BN, STAGES,
        PARTIAL, LOGITS,
    )  # fmt: skip
    s = gl.where(since == start, float("-inf"), s)
    strongest = gl.max(s, 1)
    while gl.max(((strongest >= weakest) & (strongest > float("-inf"))).to(gl.int32), 0) > 0:
        key = start + gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, LOGITS)), 0)
        slot = gl.expand_dims(gl.arange(0, BT, gl.SliceLayout(0, LISTS)), 0)
        # Of each query, the strongest key that the tile has left.
        at = gl.min(gl.where(s == gl.expand_dims(strongest, 1), key, _BEYOND), 1)
        # The weakest of the list is the last of those with its strength.
        lowest = (best == _listed(weakest, LISTS)) & (slot < wanted)
        late = gl.max(gl.where(lowest, where, -1), 1)
        free = gl.max(gl.where(lowest & (where == gl.expand_dims(late, 1)), slot, -1), 1)
        late = gl.convert_layout(late, ROWS)
        takes = (strongest > weakest) | ((strongest == weakest) & (at < late))
        here = (_listed(takes.to(gl.int32), LISTS) > 0) & (slot == gl.expand_dims(free, 1))
        best = gl.where(here, _listed(strongest, LISTS), best)
        where = gl.where(here, _listed(at, LISTS), where)
        weakest = gl.convert_layout(gl.min(gl.where(slot < wanted, best, float("inf")), 1), ROWS)
        # What is not taken is behind all of the list, and so is the rest of the tile.
        gone = (gl.expand_dims(takes.to(gl.int32), 1) == 0) | (key == gl.expand_dims(at, 1))
        s = gl.where(gone, float("-inf"), s)
        strongest = gl.max(s, 1)
    return best, where, weakest


@gluon.jit
def _listed(t, LISTS: gl.constexpr):
    """A number of each query, beside its list."""
    return gl.expand_dims(gl.convert_layout(t, gl.SliceLayout(1, LISTS)), 1)


@gluon.jit
def _find(
    half, lse, values, indices, rule, n, scale, wanted, b, h, tile, q_tiles, k_ring, q_full,
    k_full, k_free,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The strongest keys of half of the queries of a tile, in order."""
    HALF: gl.constexpr = BM // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LISTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    limit, last, right, full, every = keys_of_row_tile(rule, n, b, h, tile, 0, None, BM, BN)
    begin = tile * BM + half * HALF
    row = begin + gl.arange(0, HALF, gl.SliceLayout(1, LOGITS))
    first, many = span_of_row(rule, b, h, row, limit)
    many = gl.where(row < n.queries, many, 0)
    column = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, LOGITS)), 0)
    slot = gl.expand_dims(gl.arange(0, BT, gl.SliceLayout(0, LISTS)), 0)
    mbarrier.wait(q_full, 0)
    queries = q_tiles.index(half).reshape((HALF, D))

    high = gl.full((HALF, BN), float("-inf"), gl.float32, LOGITS)
    since = gl.full((HALF, BN), -1, gl.int32, LOGITS)
    for i in range(0, right):
        high, since = _compared(
            i, last, high, since, queries, first, many, k_ring, k_full, k_free, D, HALF, BN,
            STAGES, True, LOGITS,
        )  # fmt: skip
    for i in range(right, full):
        high, since = _compared(
            i, last, high, since, queries, first, many, k_ring, k_full, k_free, D, HALF, BN,
            STAGES, False, LOGITS,
        )  # fmt: skip
    for i in range(full, every):
        high, since = _compared(
            i, last, high, since, queries, first, many, k_ring, k_full, k_free, D, HALF, BN,
            STAGES, True, LOGITS,
        )  # fmt: skip

    best = gl.full((HALF, BT), float("-inf"), gl.float32, LISTS)
    where = gl.full((HALF, BT), -1, gl.int32, LISTS)
    for i in range(wanted):
        strongest = gl.max(high, 1)
        left = (high == gl.expand_dims(strongest, 1)) & (high > float("-inf"))
        at = gl.min(gl.where(left, since + column, _BEYOND), 1)
        here = (slot == i) & (_listed(at, LISTS) < _BEYOND)
        best = gl.where(here, _listed(strongest, LISTS), best)
        where = gl.where(here, _listed(at, LISTS), where)
        high = gl.where(since + column == gl.expand_dims(at, 1), float("-inf"), high)
    weakest = gl.convert_layout(
        gl.min(gl.where(slot < wanted, best, float("inf")), 1), gl.SliceLayout(1, LOGITS)
    )

    for i in range(0, right):
        best, where, weakest = _taken(
            i, every, last, best, where, since, weakest, wanted, queries, first, many, k_ring,
            k_full, k_free, D, HALF, BN, BT, STAGES, True, LOGITS, LISTS,
        )  # fmt: skip
    for i in range(right, full):
        best, where, weakest = _taken(
            i, every, last, best, where, since, weakest, wanted, queries, first, many, k_ring,
            k_full, k_free, D, HALF, BN, BT, STAGES, False, LOGITS, LISTS,
        )  # fmt: skip
    for i in range(full, every):
        best, where, weakest = _taken(
            i, every, last, best, where, since, weakest, wanted, queries, first, many, k_ring,
            k_full, k_free, D, HALF, BN, BT, STAGES, True, LOGITS, LISTS,
        )  # fmt: skip

    rows = begin + gl.arange(0, HALF, gl.SliceLayout(1, LISTS))
    at_row = (b * n.heads + h).to(gl.int64) * n.queries + rows
    norm = gl.load(lse + at_row, mask=rows < n.queries, other=float("-inf"))
    norm = gl.where(norm == float("-inf"), float("inf"), norm * LOG2E)
    for i in range(wanted):
        strongest = gl.max(best, 1)
        at = gl.min(gl.where(best == gl.expand_dims(strongest, 1), where, _BEYOND), 1)
        weight = gl.where(at < 0, 0.0, gl.exp2(strongest * (scale * LOG2E) - norm))
        gl.store(values + at_row * wanted + i, weight, mask=rows < n.queries)
        gl.store(indices + at_row * wanted + i, at.to(gl.int64), mask=rows < n.queries)
        gone = where == gl.expand_dims(at, 1)
        best = gl.where(gone, float("-inf"), best)
        where = gl.where(gone, -1, where)


@launched
@gluon.jit
def _top_keys_on_hopper(
    q, k, lse, values, indices, rule, n, scale, wanted,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BM // 2
    # Under a causal mask later tiles have more keys: they start first.
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    b = gl.program_id(1) // n.heads
    h = gl.program_id(1) % n.heads
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, 1, 1, HALF, D], q.layout)
    k_ring = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, D], k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _find,
                (
                    0, lse, values, indices, rule, n, scale, wanted, b, h, tile, q_tiles, k_ring,
                    q_full, k_full, k_free, D, BM, BN, BT, STAGES,
                ),
            ),
            (
                _find,
                (
                    1, lse, values, indices, rule, n, scale, wanted, b, h, tile, q_tiles, k_ring,
                    q_full, k_full, k_free, D, BM, BN, BT, STAGES,
                ),
            ),
            (
                _copy,
                (
                    q, k, rule, n, b, h, tile, q_tiles, k_ring, q_full, k_full, k_free, BM, BN,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def top_keys_on_hopper(x: AttentionInputs, lse: Float[Tensor, "b h q"], wanted: int) -> Top:
    """The strongest keys of each query, `MOST` at most, of a call that `fits_hopper`."""
    assert isinstance(x.comparison, Dot)
    B, H, Q, _ = x.shape
    values = lse.new_empty(B, H, Q, wanted)
    indices = torch.empty_like(values, dtype=torch.int64)
    rule = rule_of(x.mask, x.shape, (QUERIES, KEYS), x.q.device, by_keys=False)
    if rule.kind is ALL:
        # The widest band, as in the other kernels.
        rule = rule._replace(kind=BAND, low=-FAR, high=FAR)
    _top_keys_on_hopper[(tiles_of(Q, QUERIES), B * H)](
        described(x.q, QUERIES // 2), described(x.k, KEYS), lse, values, indices, rule, sizes(x),
        float(x.comparison.scale), wanted, D=width_on_hopper(x.q), BM=QUERIES, BN=KEYS,
        BT=8 if wanted <= 8 else 16, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return Top(values, indices)
