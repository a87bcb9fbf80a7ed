"""A mask as kernels take it: which tiles a program visits, and which of their pairs are allowed."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

ALL = tl.constexpr(0)
BAND = tl.constexpr(1)
TILES = tl.constexpr(2)
SPANS = tl.constexpr(3)


class TileLists(NamedTuple):
    """Lists of tiles, one per row tile (or one per key tile): where each list starts, its tiles,
    and for partial tiles which table of bits holds their pairs."""

    full_start: Any
    full: Any
    part_start: Any
    part: Any
    table: Any
    """For each partial tile, its place in `bits`."""
    bits: Any
    """One bit per pair: [tables, queries, keys / 8]."""


class Edges(NamedTuple):
    """Runs of keys, one for each query: where each begins, and how many they are; and where the
    loop of each tile starts, where its full tiles begin and end, and where it stops."""

    first: Any
    many: Any
    tiles: Any
    """[masks, tiles, 4], of row tiles or of key tiles."""
    size: Any
    """Queries, or keys, of a tile."""
    rows: Any
    """Queries of a mask in memory."""


class Rule(NamedTuple):
    """Which pairs are allowed: all of them, a band low <= k - q <= high, a run of keys for each
    query, or lists of tiles; and of a band only keys below a limit per batch entry, if there are
    limits."""

    kind: Any
    low: Any
    high: Any
    limits: Any
    lists: Any = None
    """The `TileLists` or `Edges` of a mask that needs them."""
    next_batch: Any = 0
    """How many lists, or masks of runs, on those of the next batch entry are; 0 when all share
    one."""
    next_head: Any = 0


@triton.jit
def limit_of(rule, sizes, b):
    """How many keys a batch entry may look at."""
    limit = sizes.keys
    if rule.limits is not None:
        limit = tl.minimum(tl.load(rule.limits + b), limit)
    return limit


@triton.jit
def span_of_keys(rule, first, last, limit, BN: tl.constexpr):
    """The keys that queries first..last see under a band, as tile borders: from `start` to `stop`,
    of which `full_start` to `full_stop` is seen by all of them."""
    start, stop = 0, limit
    full_start, full_stop = 0, limit // BN * BN
    if rule.kind == BAND:
        start = tl.maximum(first + rule.low, 0) // BN * BN
        stop = tl.minimum(stop, last + rule.high + 1)
        full_start = (tl.maximum(last + rule.low, 0) + BN - 1) // BN * BN
        full_stop = tl.minimum(limit, tl.maximum(first + rule.high + 1, 0)) // BN * BN
    stop = tl.maximum(stop, start)
    if full_start >= full_stop:
        full_start, full_stop = start, start
    return start, full_start, full_stop, stop


@triton.jit
def span_of_rows(rule, first, last, limit, queries, BM: tl.constexpr):
    """The queries that see keys first..last under a band, as `span_of_keys` gives keys."""
    start, stop = 0, queries
    full_start, full_stop = 0, queries // BM * BM
    if rule.kind == BAND:
        start = tl.maximum(first - rule.high, 0) // BM * BM
        stop = tl.minimum(queries, last - rule.low + 1)
        full_start = (tl.maximum(last - rule.high, 0) + BM - 1) // BM * BM
        full_stop = tl.minimum(queries, tl.maximum(first - rule.low + 1, 0)) // BM * BM
    if last >= limit:
        full_stop = 0
    if first >= limit:
        stop = 0
    stop = tl.maximum(stop, start)
    if full_start >= full_stop:
        full_start, full_stop = start, start
    return start, full_start, full_stop, stop


@triton.jit
def keys_for(rule, n, b, h, tile, first, last, BN: tl.constexpr):
    """The key tiles of row tile `tile` (queries first..last): how many full and partial tiles
    there are, the limit of the keys, and a path for `full_at` and `part_at`."""
    limit = limit_of(rule, n, b)
    start, full_start, full_stop, stop = span_of_keys(rule, first, last, limit, BN)
    if rule.kind == SPANS:
        start, full_start, full_stop, stop = edges_of(rule, b, h, first, n.queries)
    return _path(rule, b, h, tile, start, full_start, full_stop, stop, limit, BN)


@triton.jit
def rows_for(rule, n, b, h, tile, first, last, BM: tl.constexpr):
    """The same for key tile `tile` (keys first..last): the tiles of queries that see it."""
    limit = limit_of(rule, n, b)
    start, full_start, full_stop, stop = span_of_rows(rule, first, last, limit, n.queries, BM)
    if rule.kind == SPANS:
        start, full_start, full_stop, stop = edges_of(rule, b, h, first, n.keys)
    return _path(rule, b, h, tile, start, full_start, full_stop, stop, limit, BM)


@triton.jit
def edges_of(rule, b, h, first, length):
    """Start, begin and end of full tiles, and stop for the tile that starts at query, or key,
    `first` of `length`."""
    mask = b * rule.next_batch + h * rule.next_head
    tiles = (length + rule.lists.size - 1) // rule.lists.size
    at = rule.lists.tiles + (mask * tiles + first // rule.lists.size) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _path(rule, b, h, tile, start, full_start, full_stop, stop, limit, STEP: tl.constexpr):
    left = (full_start - start) // STEP
    full = (full_stop - full_start) // STEP
    part = left + (stop - full_stop + STEP - 1) // STEP
    full_list, part_list = 0, 0
    if rule.kind == TILES:
        mine = b * rule.next_batch + h * rule.next_head + tile
        full_list = tl.load(rule.lists.full_start + mine)
        part_list = tl.load(rule.lists.part_start + mine)
        full = tl.load(rule.lists.full_start + mine + 1) - full_list
        part = tl.load(rule.lists.part_start + mine + 1) - part_list
    if rule.kind == SPANS:
        part_list = runs_of(rule, b, h)
    return full, part, limit, (start, left, full_start, full_stop, full_list, part_list)


@triton.jit
def runs_of(rule, b, h):
    """Where the runs of a batch entry and head begin in memory."""
    base = 0
    if rule.kind == SPANS:
        base = (b * rule.next_batch + h * rule.next_head) * rule.lists.rows
    return base


@triton.jit
def full_at(rule, path, i, STEP: tl.constexpr):
    """Where full tile i of a path starts."""
    place = path[2] + i * STEP
    if rule.kind == TILES:
        place = tl.load(rule.lists.full + path[4] + i) * STEP
    return place


@triton.jit
def part_at(rule, path, i, STEP: tl.constexpr):
    """Where partial tile i of a path starts, and which table, or mask of runs, holds its pairs."""
    place = tl.where(i < path[1], path[0] + i * STEP, path[3] + (i - path[1]) * STEP)
    table = path[5]
    if rule.kind == TILES:
        place = tl.load(rule.lists.part + path[5] + i) * STEP
        table = tl.load(rule.lists.table + path[5] + i)
    return place, table


# Below q and k are indices that broadcast against each other: [BM, 1] and [1, BN], or [1, BM] and
# [BN, 1] in kernels that hold keys as rows.


@triton.jit
def band_at(rule, q, limit):
    """The first key that each query sees in a band, and how many. What holds for a query is
    computed once, not for each of its pairs: as unsigned integers, k - first < many checks both
    ends at once."""
    first = q + rule.low
    return first, tl.maximum(tl.minimum(q + rule.high, limit - 1) - first + 1, 0)


@triton.jit
def span_at(rule, q, limit, table):
    """The same of runs, or of a band."""
    if rule.kind == SPANS:
        return tl.load(rule.lists.first + table + q), tl.load(rule.lists.many + table + q)
    else:
        return band_at(rule, q, limit)


@triton.jit
def sees_some(rule, q, limit, table):
    """Whether each query sees a key, where that is known without a look at tiles."""
    if rule.kind == BAND or rule.kind == SPANS:
        first, many = span_at(rule, q, limit, table)
        return (many > 0) & (first + many > 0)
    else:
        return (q >= 0) & (limit > 0) & (rule.kind != TILES)


@triton.jit
def allowed(rule, q, k, limit, table, BM: tl.constexpr, BN: tl.constexpr):
    """Which pairs of a partial tile are allowed."""
    if rule.kind == BAND or rule.kind == SPANS:
        first, many = span_at(rule, q, limit, table)
        seen = (k - first).to(tl.uint32, bitcast=True) < many.to(tl.uint32, bitcast=True)
    else:
        seen = k < limit + 0 * q
    if rule.kind == TILES:
        row, column = q % BM, k % BN
        at = rule.lists.bits + table.to(tl.int64) * (BM * BN // 8)
        byte = tl.load(at + row * (BN // 8) + column // 8)
        seen &= ((byte >> (column % 8).to(tl.uint8)) & 1) != 0
    return seen
