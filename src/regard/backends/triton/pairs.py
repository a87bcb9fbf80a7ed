"""What every kernel does with a tile of query-key pairs: load it, say which pairs are allowed, and
give their logits.

Logits are kept in units of log 2 (multiplied by log₂ e), so that exp is one instruction, exp2.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-8.0e37)
"""The largest logit of a row that has seen nothing: finite, and below every logit."""

FAINT = tl.constexpr(-1000.0)
"""A logit so far below the largest, in units of log 2, that its weight is 0."""

MANY = 32
"""Tiles that one program looks after when it is seen whether any is to be mended."""

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Kinds of masks.
ALL = tl.constexpr(0)
BAND = tl.constexpr(1)
TILES = tl.constexpr(2)

# Kinds of biases.
NO_BIAS = tl.constexpr(0)
ALIBI = tl.constexpr(1)
RELATIVE = tl.constexpr(2)
DENSE = tl.constexpr(3)


class Sheet(NamedTuple):
    """A tensor [B, H, N, width] whose last axis is contiguous: its memory and strides."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Sizes(NamedTuple):
    """Lengths of a call: queries, keys, query heads, and query heads per key head."""

    queries: Any
    keys: Any
    heads: Any
    group: Any


class Walk(NamedTuple):
    """Lists of tiles, one per row tile (or one per key tile): where each list starts, its tiles,
    and for partial tiles which table of bits tells their pairs."""

    full_start: Any
    full: Any
    part_start: Any
    part: Any
    table: Any
    """For each partial tile, its place in `bits`."""
    bits: Any
    """One bit per pair: [tables, queries, keys / 8]."""


class Rule(NamedTuple):
    """Which pairs are allowed: all of them, a band low <= k - q <= high, or lists of tiles; and of
    these only keys below a limit per batch entry, if there are limits."""

    kind: Any
    low: Any
    high: Any
    limits: Any
    walk: Any = None
    batch: Any = 0
    """How far the lists of neighbouring batch entries are apart; 0 when they share one. Not in the
    walk, since Triton 3.6 loses a 1 that is two tuples deep."""
    head: Any = 0


class Added(NamedTuple):
    """The bias: its kind, its tensor and strides, the reach of a table, and where distance 0 is."""

    kind: Any
    ptr: Any
    batch: Any
    head: Any
    query: Any
    key: Any
    reach: Any
    offset: Any


class Score(NamedTuple):
    """What is done with q·k: scale, then soft-cap if there is one."""

    scale: Any
    positive: Any
    capped: Any
    cap: Any


class Dropping(NamedTuple):
    """Dropout: whether there is any, the seed, the 32-bit threshold and 1 / (1 - share)."""

    on: Any
    seed: Any
    threshold: Any
    grow: Any


@triton.jit
def _larger_half(s):
    """The larger of what stands at the same place of both halves of a row."""
    rows: tl.constexpr = s.shape[0]
    half: tl.constexpr = s.shape[1] // 2
    left, right = s.reshape(rows, 2, half).permute(0, 2, 1).split()
    return tl.maximum(left, right)


@triton.jit
def row_max(s):
    """The largest number of each row. Halves are compared first: a thread that goes through its
    numbers one by one waits for each comparison."""
    return tl.max(_larger_half(_larger_half(s)), 1)


@triton.jit
def product(a, b, onto, PRECISION: tl.constexpr):
    """a @ b + onto, in float32."""
    if INTERPRETED:
        # Triton's interpreter multiplies bfloat16 numbers as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, onto, input_precision=PRECISION)


@triton.jit
def load_rows(
    sheet, b, h, start, count, width: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """N rows from `start`, [N, WIDE]; 0 beyond `count` rows and `width` numbers."""
    base = sheet.ptr + b.to(tl.int64) * sheet.batch + h.to(tl.int64) * sheet.head
    row, column = tl.arange(0, N), tl.arange(0, WIDE)
    base += start.to(tl.int64) * sheet.row
    at = base + row[:, None] * sheet.row + column[None, :]
    if INSIDE:
        if width == WIDE:
            return tl.load(at)
        return tl.load(at, mask=(column < width)[None, :], other=0.0)
    inside = (start + row < count)[:, None] & (column < width)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def norms(lse, at, inside):
    """lse in units of log 2; rows that see nothing get +∞, which makes all their weights 0."""
    norm = tl.load(lse + at, mask=inside, other=float("-inf"))
    return tl.where(norm == float("-inf"), float("inf"), norm * LOG2E)


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
    """The walk of row tile `tile` (queries first..last) over its keys: how many full and partial
    tiles there are, the limit of the keys, and a path from which `tile_at` tells each tile."""
    limit = limit_of(rule, n, b)
    start, full_start, full_stop, stop = span_of_keys(rule, first, last, limit, BN)
    return _walk(rule, b, h, tile, start, full_start, full_stop, stop, limit, BN)


@triton.jit
def rows_for(rule, n, b, h, tile, first, last, BM: tl.constexpr):
    """The walk of key tile `tile` (keys first..last) over the queries that see it."""
    limit = limit_of(rule, n, b)
    start, full_start, full_stop, stop = span_of_rows(rule, first, last, limit, n.queries, BM)
    return _walk(rule, b, h, tile, start, full_start, full_stop, stop, limit, BM)


@triton.jit
def _walk(rule, b, h, tile, start, full_start, full_stop, stop, limit, STEP: tl.constexpr):
    left = (full_start - start) // STEP
    full = (full_stop - full_start) // STEP
    part = left + (stop - full_stop + STEP - 1) // STEP
    full_list, part_list = 0, 0
    if rule.kind == TILES:
        mine = b * rule.batch + h * rule.head + tile
        full_list = tl.load(rule.walk.full_start + mine)
        part_list = tl.load(rule.walk.part_start + mine)
        full = tl.load(rule.walk.full_start + mine + 1) - full_list
        part = tl.load(rule.walk.part_start + mine + 1) - part_list
    return full, part, limit, (start, left, full_start, full_stop, full_list, part_list)


@triton.jit
def full_at(rule, path, i, STEP: tl.constexpr):
    """Where full tile i of a walk starts."""
    place = path[2] + i * STEP
    if rule.kind == TILES:
        place = tl.load(rule.walk.full + path[4] + i) * STEP
    return place


@triton.jit
def part_at(rule, path, i, STEP: tl.constexpr):
    """Where partial tile i of a walk starts, and which table tells its pairs."""
    place = tl.where(i < path[1], path[0] + i * STEP, path[3] + (i - path[1]) * STEP)
    table = place * 0
    if rule.kind == TILES:
        place = tl.load(rule.walk.part + path[5] + i) * STEP
        table = tl.load(rule.walk.table + path[5] + i)
    return place, table


# From here on q and k (and one head h per query) are indices that broadcast against each other:
# [BM, 1] and [1, BN], or [1, BM] and [BN, 1] in kernels that hold keys as rows.


@triton.jit
def band_at(rule, q, limit):
    """The first key that each query sees in a band, and how many. What can be said of a query once
    is not said of each of its pairs: k - first < many, without a sign, tells both ends at once."""
    first = q + rule.low
    return first, tl.maximum(tl.minimum(q + rule.high, limit - 1) - first + 1, 0)


@triton.jit
def allowed(rule, q, k, limit, table, BM: tl.constexpr, BN: tl.constexpr):
    """Which pairs of a partial tile are allowed."""
    if rule.kind == BAND:
        first, many = band_at(rule, q, limit)
        seen = (k - first).to(tl.uint32, bitcast=True) < many.to(tl.uint32, bitcast=True)
    else:
        seen = k < limit + 0 * q
    if rule.kind == TILES:
        row, column = q % BM, k % BN
        at = rule.walk.bits + table.to(tl.int64) * (BM * BN // 8)
        byte = tl.load(at + row * (BN // 8) + column // 8)
        seen &= ((byte >> (column % 8).to(tl.uint8)) & 1) != 0
    return seen


@triton.jit
def bias_at(added, b, h, q, k, n):
    """The bias of pairs, in natural units."""
    if added.kind == ALIBI:
        slope = tl.load(added.ptr + h).to(tl.float32)
        return -slope * distance_of(added, q, k).to(tl.float32)
    if added.kind == RELATIVE:
        return tl.load(added.ptr + h * added.head + cell_of(added, q, k)).to(tl.float32)
    row = b.to(tl.int64) * added.batch + h.to(tl.int64) * added.head
    row += q.to(tl.int64) * added.query
    inside = (q < n.queries) & (k < n.keys)
    return tl.load(added.ptr + row + k * added.key, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def distance_of(added, q, k):
    return tl.abs(k - q - added.offset)


@triton.jit
def cell_of(added, q, k):
    """The column of a relative table."""
    distance = k - q - added.offset
    return tl.minimum(tl.maximum(distance, -added.reach), added.reach) + added.reach


@triton.jit
def tanh(x):
    """Near 0 a polynomial, since 1 - 2 / (e²ˣ + 1) would cancel there."""
    y = x * x
    near = -5.70498872745e-3 * y + 2.06390887954e-2
    near = near * y - 5.37397155531e-2
    near = near * y + 1.33314422036e-1
    near = near * y - 3.33332819422e-1
    near = near * y * x + x
    far = 1 - 2 / (tl.exp2(tl.abs(x) * (2 * LOG2E)) + 1)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def logits_of(products, score, added, b, h, q, k, n):
    """Logits, times log₂ e, from q·k; and the slope of the soft-cap."""
    if not score.capped and added.kind == NO_BIAS:
        return products * (score.scale * LOG2E), 1.0
    s = products * score.scale
    slope = 1.0
    if score.capped:
        bent = tanh(s / score.cap)
        slope = 1 - bent * bent
        s = score.cap * bent
    if added.kind != NO_BIAS:
        s += bias_at(added, b, h, q, k, n)
    return s * LOG2E, slope


@triton.jit
def _mixed(word):
    """As `dropping._mixed`: the finaliser of MurmurHash3."""
    word = word + 0x9E3779B9
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def kept(drop, b, h, q, k):
    """Which weights dropout leaves, as `dropping.kept`."""
    word = _mixed(drop.seed.to(tl.uint32) + b.to(tl.uint32))
    word = _mixed(_mixed(word + h.to(tl.uint32)) + q.to(tl.uint32))
    return _mixed(word + k.to(tl.uint32)) >= drop.threshold.to(tl.uint32)


@triton.jit
def finite_only(t):
    """0 in place of NaN and infinity."""
    wide = t.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(t.dtype)


@triton.jit
def spoilt(
    flags, out, n, b, h, first, tiles, E: tl.constexpr, BE: tl.constexpr, MANY: tl.constexpr
):
    """Whether a hidden NaN may have spoilt one of MANY tiles from `first` on.

    Flags tell, one per tile. Without flags the last row of the output tells: a causal mask hides
    nothing from it, so if it is finite there is no NaN that could have leaked.
    """
    if flags is not None:
        tile = first + tl.arange(0, MANY)
        mine = flags + tl.program_id(1) * tiles
        found = tl.max(tl.load(mine + tile, mask=tile < tiles, other=0).to(tl.int32), 0)
    else:
        wide = tl.arange(0, BE)
        row = out.ptr + b.to(tl.int64) * out.batch + h.to(tl.int64) * out.head
        row += (n.queries - 1).to(tl.int64) * out.row
        final = tl.load(row + wide, mask=wide < E, other=0.0).to(tl.float32)
        found = tl.max((tl.abs(final) < float("inf")).to(tl.int32) ^ 1, 0)
    return found != 0


@triton.jit
def flagged(flags, tiles, tile):
    """Whether a tile was flagged; without flags every one counts as if it were."""
    here = tile >= 0
    if flags is not None:
        here = tl.load(flags + tl.program_id(1) * tiles + tile) != 0
    return here
