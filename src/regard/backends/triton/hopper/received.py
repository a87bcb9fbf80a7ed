"""What each key received, on Hopper: one warp copies, three groups of warps multiply.

A program owns a tile of keys. The copying warp streams tiles of queries past it, and the groups
take them in turn: while one exponentiates, the products of the others run. Weights are added up in
place, pair by pair, and over the queries only once at the end.
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

from regard.backends.triton.arguments import sizes, tiles_of
from regard.backends.triton.assembly import WEIGHT_BELOW
from regard.backends.triton.hopper.barriers import free, queries_free, wait_until_free
from regard.backends.triton.hopper.pairs import (
    described,
    fetch,
    only_allowed,
    queries_of_key_tile,
    span_of_row,
    width_on_hopper,
)
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import FAR, rule_of
from regard.backends.triton.pairs import LOG2E
from regard.backends.triton.rules import ALL, BAND
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot

QUERIES, KEYS, STAGES = 64, 128, 6
GROUPS = gl.constexpr(3)


@gluon.jit
def _copy(
    q, k, rule, n, b, h, tile, k_tile, q_ring, k_full, q_full,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the keys, then tiles of queries as room becomes free."""
    _, start, _, _, every = queries_of_key_tile(rule, n, b, h, tile, BM, BN)
    mbarrier.expect(k_full, k.block_type.nbytes)
    fetch(k, [b, h // n.group, tile * BN, 0], k_full, k_tile)
    for i in range(every):
        slot = i % STAGES
        wait_until_free(queries_free(slot), i >= STAGES, 1)
        mbarrier.expect(q_full.index(slot), q.block_type.nbytes)
        fetch(q, [b, h, start + i * BM, 0], q_full.index(slot), q_ring.index(slot))
    # No barrier is left with arrivals that nobody met.
    for i in gl.static_range(STAGES):
        wait_until_free(queries_free(i), every > i, 1)


@gluon.jit
def _norms(lse, row, n):
    """lse in units of log 2; rows that see nothing, and those past the last, get +∞."""
    norm = gl.load(lse + row, mask=row < n.queries, other=float("-inf"))
    return gl.where(norm == float("-inf"), float("inf"), norm * LOG2E)


@gluon.jit
def _take(
    i, total, norm, lse, rule, n, scale, b, h, start, tile, limit, k_tile, q_ring, q_full,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL: gl.constexpr, LOGITS: gl.constexpr,
):  # fmt: skip
    """Add the weights of query tile i, whose norms are there. Those of this group's next tile are
    on their way meanwhile."""
    slot = i % STAGES
    row = start + i * BM + gl.arange(0, BM, gl.SliceLayout(1, LOGITS))
    mbarrier.wait(q_full.index(slot), (i // STAGES) & 1)
    s = gl.zeros((BM, BN), gl.float32, LOGITS)
    queries = q_ring.index(slot).reshape((BM, D))
    keys = k_tile.reshape((BN, D)).permute((1, 0))
    s = warpgroup_mma(queries, keys, s, use_acc=False, is_async=True)
    later = _norms(lse, row + GROUPS * BM, n)
    s = warpgroup_mma_wait(0, deps=(s,))
    free(queries_free(slot), 1)
    p = gl.exp2(s * scale - gl.expand_dims(norm, 1))
    if PARTIAL:
        first, many = span_of_row(rule, b, h, row, limit)
        many = gl.where(norm == float("inf"), 0, many)
        p = only_allowed(WEIGHT_BELOW, p, tile * BN, first, many, BN, LOGITS)
    return total + p, later


@gluon.jit
def _sum(
    turn, lse, out, rule, n, scale, b, h, tile, k_tile, q_ring, k_full, q_full,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Every third tile of queries against the keys of a tile."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    limit, start, left, full, every = queries_of_key_tile(rule, n, b, h, tile, BM, BN)
    lse += (b * n.heads + h).to(gl.int64) * n.queries
    scale = scale * LOG2E
    mbarrier.wait(k_full, 0)
    total = gl.zeros((BM, BN), gl.float32, LOGITS)
    norm = _norms(lse, start + turn * BM + gl.arange(0, BM, gl.SliceLayout(1, LOGITS)), n)
    # The first of this group's tiles at or past the border of the full ones, and past their end.
    first_full = turn + (gl.maximum(left - turn, 0) + GROUPS - 1) // GROUPS * GROUPS
    past_full = turn + (gl.maximum(full - turn, 0) + GROUPS - 1) // GROUPS * GROUPS
    for i in range(turn, first_full, GROUPS):
        total, norm = _take(
            i, total, norm, lse, rule, n, scale, b, h, start, tile, limit, k_tile, q_ring, q_full,
            D, BM, BN, STAGES, True, LOGITS,
        )  # fmt: skip
    for i in range(first_full, past_full, GROUPS):
        total, norm = _take(
            i, total, norm, lse, rule, n, scale, b, h, start, tile, limit, k_tile, q_ring, q_full,
            D, BM, BN, STAGES, False, LOGITS,
        )  # fmt: skip
    for i in range(past_full, every, GROUPS):
        total, norm = _take(
            i, total, norm, lse, rule, n, scale, b, h, start, tile, limit, k_tile, q_ring, q_full,
            D, BM, BN, STAGES, True, LOGITS,
        )  # fmt: skip
    key = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, LOGITS))
    sums = out + ((b * n.heads + h).to(gl.int64) * GROUPS + turn) * n.keys + key
    gl.store(sums, gl.sum(total, 0), mask=key < n.keys)


@launched
@gluon.jit
def _received_on_hopper(
    q, k, lse, out, rule, n, scale,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tile = gl.program_id(0)
    b = gl.program_id(1) // n.heads
    h = gl.program_id(1) % n.heads
    k_tile = gl.allocate_shared_memory(k.dtype, [1, 1, BN, D], k.layout)
    q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BM, D], q.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _sum,
                (
                    0, lse, out, rule, n, scale, b, h, tile, k_tile, q_ring, k_full, q_full,
                    D, BM, BN, STAGES,
                ),
            ),
            (
                _sum,
                (
                    1, lse, out, rule, n, scale, b, h, tile, k_tile, q_ring, k_full, q_full,
                    D, BM, BN, STAGES,
                ),
            ),
            (
                _sum,
                (
                    2, lse, out, rule, n, scale, b, h, tile, k_tile, q_ring, k_full, q_full,
                    D, BM, BN, STAGES,
                ),
            ),
            (
                _copy,
                (
                    q, k, rule, n, b, h, tile, k_tile, q_ring, k_full, q_full, BM, BN, STAGES,
                ),
            ),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )  # fmt: skip


def received_on_hopper(
    x: AttentionInputs, lse: Float[Tensor, "b h q"]
) -> Float[Tensor, "b h groups k"]:
    """What each key received from the queries of each group, for a call that `fits_hopper`."""
    assert isinstance(x.comparison, Dot)
    B, H, _, K = x.shape
    out = torch.empty(B, H, GROUPS.value, K, dtype=torch.float32, device=x.q.device)
    rule = rule_of(x.mask, x.shape, (QUERIES, KEYS), x.q.device, by_keys=True)
    if rule.kind is ALL:
        # The widest band. (Triton 3.6 fails to compile the kernel without one.)
        rule = rule._replace(kind=BAND, low=-FAR, high=FAR)
    _received_on_hopper[(tiles_of(K, KEYS), B * H)](
        described(x.q, QUERIES), described(x.k, KEYS), lse, out, rule, sizes(x),
        float(x.comparison.scale), D=width_on_hopper(x.q), BM=QUERIES, BN=KEYS, STAGES=STAGES,
        num_warps=4,
    )  # fmt: skip
    return out
