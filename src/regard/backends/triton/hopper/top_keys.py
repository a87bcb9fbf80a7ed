"""The strongest keys of each query, on Hopper: one warp copies, three groups of warps multiply.

A program owns a tile of queries, each group a third of them. The copying warp streams the keys past
them twice, and while one group compares, the products of the others run. In the first pass a group
keeps the largest logit of each column: the n-th largest of these bounds the n-th largest of all
from below, wherever it stood. In the second it keeps what reaches that bound (`octets.py`), which
is hardly more than n logits of a row. Either is one comparison a pair.

Where more logits reach the bound than there is room for, as among keys that are all alike, the tile
is marked, and the general kernel does it again.
"""

from __future__ import annotations

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
from regard.backends.triton.hopper.barriers import (
    KEYS_FREE,
    free,
    meet_own,
    queries_free,
    wait_until_free,
)
from regard.backends.triton.hopper.octets import (
    GROUPS,
    LISTED,
    PARTS,
    ROWS,
    SPARE,
    WORDS,
    gather,
    keep,
)
from regard.backends.triton.hopper.pairs import (
    described,
    fetch,
    seen_logits,
    span_of_row,
    width_on_hopper,
)
from regard.backends.triton.hopper.producer import item_of, write_item
from regard.backends.triton.hopper.schedule import keys_of_row_tile, place_of
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import FAR, rule_of
from regard.backends.triton.pairs import LOG2E
from regard.backends.triton.rules import ALL, BAND
from regard.backends.triton.settings.tuning import processors
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot

KEYS, STAGES = 128, 3
MOST = 16
"""Keys of a list that registers hold beside all else."""
_BEYOND = gl.constexpr(2**31 - 1)
"""No key."""
_LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The lowest bound: what is masked does not reach it."""
_FEW = gl.constexpr(16)
"""Logits of a thread's list that are looked at, where no thread of a tile has more."""
_SHARE = gl.constexpr(64)
"""Queries of a group."""


@gluon.jit
def _copy(
    q, k, rule, n, items, taken, facts, q_tiles, k_ring, q_full, k_full,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the queries of tile after tile, and all keys of each, twice, as room becomes free. Which
    tile comes next is counted by all programs together."""
    item = gl.program_id(0)
    step = 0
    turn = 0
    while item < items:
        tile, b, h, split = place_of(item, n, None, BM)
        _, last, _, _, every = keys_of_row_tile(rule, n, b, h, tile, split, None, BM, BN)
        wait_until_free(queries_free(0), turn > 0, GROUPS)
        write_item(facts, 0, item)
        mbarrier.expect(q_full, GROUPS * q.block_type.nbytes)
        for group in gl.static_range(GROUPS):
            first = tile * BM + group * _SHARE
            fetch(q, [b, h, first, 0], q_full, q_tiles.index(group))
        turn += 1
        for i in range(2 * every):
            slot = step % STAGES
            wait_until_free(KEYS_FREE + slot, step >= STAGES, GROUPS)
            mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
            first = last - i % every * BN
            fetch(k, [b, h // n.group, first, 0], k_full.index(slot), k_ring.index(slot))
            step += 1
        item = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
    wait_until_free(queries_free(0), turn > 0, GROUPS)
    write_item(facts, 0, items)
    mbarrier.arrive(q_full, count=1)
    # No barrier is left with arrivals that nobody met.
    for i in gl.static_range(STAGES):
        wait_until_free(KEYS_FREE + i, step > i, GROUPS)


@gluon.jit
def _products(
    step, start, queries, first, many, k_ring, k_full,
    D: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PARTIAL: gl.constexpr,
    LOGITS: gl.constexpr,
):  # fmt: skip
    """Products with a tile of keys, in the order of the logits; minus infinity where masked."""
    slot = step % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    s = gl.zeros((_SHARE, BN), gl.float32, LOGITS)
    keys = k_ring.index(slot).reshape((BN, D)).permute((1, 0))
    s = warpgroup_mma(queries, keys, s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    free(KEYS_FREE + slot, GROUPS)
    if PARTIAL:
        s = seen_logits(s, start, first, many, BN, LOGITS)
    return s


@gluon.jit
def _bound(high, wanted, LONG: gl.constexpr):
    """A number that as many logits of each row reach as are wanted, from the largest of each
    column. Of four columns of a thread, or of two for long lists, the largest is good enough."""
    columns: gl.constexpr = high.shape[1]
    if LONG:
        high = gl.max(high.reshape((_SHARE, columns // 2, 2)), 2)
    else:
        fours = high.reshape((_SHARE, columns // 16, 2, 4, 2)).permute((0, 1, 3, 2, 4))
        high = gl.max(gl.max(fours, 4), 3).reshape((_SHARE, columns // 4))
    for _ in range(1, wanted):
        # Equal ones are one here: the bound is lower for it.
        high = gl.where(high >= gl.expand_dims(gl.max(high, 1), 1), float("-inf"), high)
    return gl.max(high, 1)


@gluon.jit
def _answer(
    lists, group, lse, values, indices, n, scale, wanted, b, h, begin, LENGTH: gl.constexpr
):
    """The strongest keys of a group's rows, in order, from the lists of their threads: up to LENGTH
    of each."""
    LISTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 4 * LENGTH, 16])
    row = gl.arange(0, _SHARE, gl.SliceLayout(1, LISTS))
    column = gl.expand_dims(gl.arange(0, 4 * LENGTH, gl.SliceLayout(0, LISTS)), 0)
    part = gl.expand_dims(4 * (group * _SHARE + row), 1) + column % 4
    there = column // 4 < gl.load(lists + 2 * (LISTED * PARTS + part))
    entry = lists + 2 * (column // 4 * PARTS + part)
    logit = gl.load(entry, mask=there, other=0).to(gl.float32, bitcast=True)
    logit = gl.where(there, logit, float("-inf"))
    key = gl.load(entry + 1, mask=there, other=-1)
    rows = begin + row
    at_row = (b * n.heads + h).to(gl.int64) * n.queries + rows
    norm = gl.load(lse + at_row, mask=rows < n.queries, other=float("-inf"))
    norm = gl.where(norm == float("-inf"), float("inf"), norm * LOG2E)
    for i in range(wanted):
        strongest = gl.max(logit, 1)
        at = gl.min(gl.where(logit == gl.expand_dims(strongest, 1), key, _BEYOND), 1)
        weight = gl.where(at < 0, 0.0, gl.exp2(strongest * (scale * LOG2E) - norm))
        gl.store(values + at_row * wanted + i, weight, mask=rows < n.queries)
        gl.store(indices + at_row * wanted + i, at.to(gl.int64), mask=rows < n.queries)
        gone = key == gl.expand_dims(at, 1)
        logit = gl.where(gone, float("-inf"), logit)
        key = gl.where(gone, -1, key)


@gluon.jit
def _find(
    group, lse, values, indices, octets, lists, marks, rule, n, scale, wanted, items, facts,
    q_tiles, k_ring, q_full, k_full,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ROOM: gl.constexpr, LONG: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The strongest keys of a third of the queries of tile after tile."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    octets += gl.program_id(0).to(gl.int64) * ((ROOM + SPARE) * PARTS * WORDS)
    lists += gl.program_id(0).to(gl.int64) * ((LISTED + 1) * PARTS * 2)
    queries = q_tiles.index(group).reshape((_SHARE, D))
    share = gl.arange(0, _SHARE, OF_ROWS)
    column = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, LOGITS)), 0)
    part = gl.expand_dims(4 * (group * _SHARE + share), 1) + column // 2 % 4
    begins = part * (4 * WORDS)
    ends = (ROOM * PARTS + part) * (4 * WORDS)
    each = gl.expand_dims(4 * (group * _SHARE + gl.arange(0, _SHARE, gl.SliceLayout(1, FOUR))), 1)
    each += gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, FOUR)), 0)
    step = 0
    turn = 0
    mbarrier.wait(q_full, 0)
    item = item_of(facts, 0)
    while item < items:
        tile, b, h, split = place_of(item, n, None, BM)
        limit, last, right, full, every = keys_of_row_tile(rule, n, b, h, tile, split, None, BM, BN)
        begin = tile * BM + group * _SHARE
        row = begin + share
        first, many = span_of_row(rule, b, h, row, limit)
        many = gl.where(row < n.queries, many, 0)

        high = gl.full((_SHARE, BN), float("-inf"), gl.float32, LOGITS)
        for i in range(0, right):
            s = _products(
                step, last - i * BN, queries, first, many, k_ring, k_full, D, BN, STAGES, True,
                LOGITS,
            )  # fmt: skip
            high = gl.maximum(high, s)
            step += 1
        for i in range(right, full):
            s = _products(
                step, last - i * BN, queries, first, many, k_ring, k_full, D, BN, STAGES, False,
                LOGITS,
            )  # fmt: skip
            high = gl.maximum(high, s)
            step += 1
        for i in range(full, every):
            s = _products(
                step, last - i * BN, queries, first, many, k_ring, k_full, D, BN, STAGES, True,
                LOGITS,
            )  # fmt: skip
            high = gl.maximum(high, s)
            step += 1
        bound = gl.maximum(gl.convert_layout(_bound(high, wanted, LONG), OF_ROWS), _LOWEST)
        # Full tiles have queries behind the last, too.
        bound = gl.where(row < n.queries, bound, float("inf"))

        place = begins
        for i in range(0, right):
            start = last - i * BN
            s = _products(
                step, start, queries, first, many, k_ring, k_full, D, BN, STAGES, True, LOGITS
            )
            place = keep(s, bound, place, ends, start, octets)
            step += 1
        for i in range(right, full):
            start = last - i * BN
            s = _products(
                step, start, queries, first, many, k_ring, k_full, D, BN, STAGES, False, LOGITS
            )
            place = keep(s, bound, place, ends, start, octets)
            step += 1
        for i in range(full, every):
            start = last - i * BN
            s = _products(
                step, start, queries, first, many, k_ring, k_full, D, BN, STAGES, True, LOGITS
            )
            place = keep(s, bound, place, ends, start, octets)
            step += 1
        free(queries_free(0), GROUPS)

        gather(place, begins, ends, bound, octets, lists, part * 8)
        meet_own(group)
        most = gl.max(gl.max(gl.load(lists + 2 * (LISTED * PARTS + each)), 1), 0)
        if LONG:
            if most <= _FEW:
                _answer(lists, group, lse, values, indices, n, scale, wanted, b, h, begin, _FEW)
            else:
                _answer(
                    lists, group, lse, values, indices, n, scale, wanted, b, h, begin, LISTED + 1
                )
            lost = most > LISTED
        else:
            _answer(lists, group, lse, values, indices, n, scale, wanted, b, h, begin, _FEW)
            lost = most > _FEW
        if lost:
            gl.store(marks + item // gl.cdiv(n.queries, BM) * gl.cdiv(n.queries, BM) + tile, 1)
        # All have read the lists before the next are written.
        meet_own(group)
        turn += 1
        mbarrier.wait(q_full, turn & 1)
        item = item_of(facts, 0)


@launched
@gluon.jit(do_not_specialize=["items", "wanted"])
def _top_keys_on_hopper(
    q, k, lse, values, indices, octets, lists, taken, marks, rule, n, scale, wanted, items,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ROOM: gl.constexpr, LONG: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Tile after tile of queries. `taken` and `marks` start at 0."""
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    facts = gl.allocate_shared_memory(gl.int32, [1, 1], ONE)
    q_tiles = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, _SHARE, D], q.layout)
    k_ring = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BN, D], k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _find,
                (
                    0, lse, values, indices, octets, lists, marks, rule, n, scale, wanted, items,
                    facts, q_tiles, k_ring, q_full, k_full, D, BM, BN, ROOM, LONG, STAGES,
                ),
            ),
            (
                _find,
                (
                    1, lse, values, indices, octets, lists, marks, rule, n, scale, wanted, items,
                    facts, q_tiles, k_ring, q_full, k_full, D, BM, BN, ROOM, LONG, STAGES,
                ),
            ),
            (
                _find,
                (
                    2, lse, values, indices, octets, lists, marks, rule, n, scale, wanted, items,
                    facts, q_tiles, k_ring, q_full, k_full, D, BM, BN, ROOM, LONG, STAGES,
                ),
            ),
            (
                _copy,
                (
                    q, k, rule, n, items, taken, facts, q_tiles, k_ring, q_full, k_full, BM, BN,
                    STAGES,
                ),
            ),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )  # fmt: skip


def marks_on_hopper(x: AttentionInputs) -> int:
    """How many numbers the kernel wants that are 0: one, and one for each tile of queries."""
    return 1 + tiles_of(x.shape.Q, ROWS) * x.shape.B * x.shape.H


def top_keys_on_hopper(
    x: AttentionInputs, lse: Float[Tensor, "b h q"], wanted: int, to: Top, marks: Tensor
) -> tuple[Tensor, Tensor]:
    """The strongest keys of each query, `MOST` at most, of a call that `fits_hopper`. Tiles that
    are to be done again are marked, behind the first of the `marks`. Returns scratch memory."""
    assert isinstance(x.comparison, Dot)
    rule = rule_of(x.mask, x.shape, (ROWS, KEYS), x.q.device, by_keys=False)
    if rule.kind is ALL:
        # The widest band, as in the other kernels.
        rule = rule._replace(kind=BAND, low=-FAR, high=FAR)
    items = len(marks) - 1
    programs = min(items, processors(x.q.device))
    long = wanted > MOST // 2
    room = 24 if long else 16
    octets = marks.new_empty(programs, room + SPARE.value, PARTS.value, WORDS.value)
    lists = marks.new_empty(programs, LISTED.value + 1, PARTS.value, 2)
    _top_keys_on_hopper[(programs,)](
        described(x.q, _SHARE.value), described(x.k, KEYS), lse, *to, octets, lists, marks,
        marks[1:], rule, sizes(x), float(x.comparison.scale), wanted, items,
        D=width_on_hopper(x.q), BM=ROWS, BN=KEYS, ROOM=room, LONG=long, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return octets, lists
