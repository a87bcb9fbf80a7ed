"""The warp that copies, in the forward pass: queries of tile after tile, and the keys and values of
each. It also tells the multiplying groups which tile comes next, and which keys it sees."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from regard.backends.triton.hopper.barriers import (
    KEYS_FREE,
    VALUES_FREE,
    queries_free,
    wait_until_free,
)
from regard.backends.triton.hopper.pairs import fetch
from regard.backends.triton.hopper.schedule import keys_of_row_tile, place_of

FACTS = gl.constexpr(10)
"""How many numbers the copying warp writes for each tile of queries."""


@gluon.jit
def copy_tiles(
    q, k, v, c, rule, n, items, splits, taken, facts, q_tiles, k_ring, v_ring, c_ring, q_full,
    k_full, v_full,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Copy the queries of tile after tile, then the keys and values of each step, as room becomes
    free. Which tile comes next is counted by all programs together, where there are more tiles."""
    HALF: gl.constexpr = BM // 2
    item = gl.program_id(0)
    step = 0
    slot = 0
    turn = 0
    while item < items:
        tile, b, h, split = place_of(item, n, splits, BM)
        g = h
        if n.group > 1:
            g = h // n.group
        limit, last, right, full, every = keys_of_row_tile(
            rule, n, b, h, tile, split, splits, BM, BN
        )
        place = turn % PLACES
        wait_until_free(queries_free(place), turn >= PLACES)
        _write_facts(facts, place, item, tile, b, h, split, limit, last, right, full, every)
        mbarrier.expect(q_full.index(place), 2 * q.block_type.nbytes)
        fetch(q, [b, h, tile * BM, 0], q_full.index(place), q_tiles.index(2 * place))
        fetch(q, [b, h, tile * BM + HALF, 0], q_full.index(place), q_tiles.index(2 * place + 1))
        turn += 1
        for i in range(every):
            key = last - i * BN
            wait_until_free(KEYS_FREE + slot, step >= STAGES)
            mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
            fetch(k, [b, g, key, 0], k_full.index(slot), k_ring.index(slot))
            wait_until_free(VALUES_FREE + slot, step >= STAGES)
            if c is None:
                mbarrier.expect(v_full.index(slot), v.block_type.nbytes)
            else:
                mbarrier.expect(v_full.index(slot), v.block_type.nbytes + c.block_type.nbytes)
                fetch(c, [b, h, key, 0], v_full.index(slot), c_ring.index(slot))
            fetch(v, [b, g, key, 0], v_full.index(slot), v_ring.index(slot))
            step += 1
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        if taken is None:
            item = items
        else:
            item = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
    place = turn % PLACES
    wait_until_free(queries_free(place), turn >= PLACES)
    write_item(facts, place, items)
    mbarrier.arrive(q_full.index(place), count=1)
    # No barrier is left with arrivals that nobody met.
    if PLACES == 2:
        wait_until_free(queries_free(1 - place), turn > 0)
    for i in gl.static_range(STAGES):
        wait_until_free(KEYS_FREE + i, step > i)
        wait_until_free(VALUES_FREE + i, step > i)


@gluon.jit
def _write_facts(facts, place, item, tile, b, h, split, limit, last, right, full, every):
    """Tell the multiplying groups which tile of queries comes next, and its keys: they would
    divide and load for as long as a tile of keys takes, with nothing to do meanwhile."""
    at = place * FACTS
    write_item(facts, place, item)
    _write(facts, at + 1, tile)
    _write(facts, at + 2, b)
    _write(facts, at + 3, h)
    _write(facts, at + 4, split)
    _write(facts, at + 5, limit)
    _write(facts, at + 6, last)
    _write(facts, at + 7, right)
    _write(facts, at + 8, full)
    _write(facts, at + 9, every)


@gluon.jit
def write_item(facts, place, item):
    """Tell them the number of the next tile alone, or that none follows."""
    _write(facts, place * FACTS, item)


@gluon.jit
def item_of(facts, place):
    """The number of the next tile of queries; after the last, that of all tiles or more."""
    return _read(facts, place * FACTS)


@gluon.jit
def facts_of(facts, place):
    """Where a tile of queries is, and which keys it visits."""
    at = place * FACTS
    return (
        _read(facts, at + 1), _read(facts, at + 2), _read(facts, at + 3), _read(facts, at + 4),
        _read(facts, at + 5), _read(facts, at + 6), _read(facts, at + 7), _read(facts, at + 8),
        _read(facts, at + 9),
    )  # fmt: skip


@gluon.jit
def _write(facts, at, number):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    facts.index(at).store(gl.full((1,), 0, gl.int32, ONE) + number)


@gluon.jit
def _read(facts, at):
    SAME: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(facts.index(at).load(SAME), 0)
