"""What every kernel does with a tile of query-key pairs: load it and give its logits.

Logits are kept in units of log 2 (multiplied by log₂ e), so that exp is one instruction, exp2.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.biases.bias import LOWEST as _LOWEST

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(_LOWEST)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-8.0e37)
"""The largest logit of a row before its first key: finite, and below every logit."""
UNSEEN = tl.constexpr(-7.9e37)
"""The same of a row that sees keys, before it has met them. If it stays that, all its logits are
minus infinity, and it is NaN, not empty."""

FAINT = tl.constexpr(-1000.0)
"""A logit so far below the largest, in units of log 2, that its weight is 0."""

MANY = 32
"""Tiles that one program checks for a masked NaN that may have leaked."""

GOLDEN = tl.constexpr(0x9E3779B9)
"""What dropout adds to a word before it is mixed."""

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

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


class Added(NamedTuple):
    """The bias: its kind, its tensor and strides, the largest distance of a table, the offset."""

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


class Seed(int):
    """Dropout's number, which is another one in each call of a kind."""


class Dropping(NamedTuple):
    """Dropout: whether there is any, the seed, the 32-bit threshold and 1 / (1 - rate)."""

    on: Any
    seed: Any
    threshold: Any
    grow: Any


@triton.jit
def _larger_half(s):
    """The elementwise maximum of both halves of a row."""
    rows: tl.constexpr = s.shape[0]
    half: tl.constexpr = s.shape[1] // 2
    left, right = s.reshape(rows, 2, half).permute(0, 2, 1).split()
    return tl.maximum(left, right)


@triton.jit
def row_max(s):
    """The maximum of each row. Halves are compared first: a thread that compares its numbers one
    after another waits for each comparison."""
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
    """N rows from `start`, [N, WIDE]; 0 past `count` rows and past head dimension `width`."""
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
    """log-sum-exp in units of log 2; fully masked rows get +∞, which makes all their weights 0."""
    norm = tl.load(lse + at, mask=inside, other=float("-inf"))
    return tl.where(norm == float("-inf"), float("inf"), norm * LOG2E)


# From here on q and k (and one head h per query) are indices that broadcast against each other:
# [BM, 1] and [1, BN], or [1, BM] and [BN, 1] in kernels that hold keys as rows.


@triton.jit
def bias_at(added, b, h, q, k, n):
    """The bias of pairs, in natural units."""
    if added.kind == ALIBI:
        slope = tl.load(added.ptr + h).to(tl.float32)
        return -slope * distance_of(added, q, k)
    if added.kind == RELATIVE:
        return lifted(tl.load(added.ptr + h * added.head + cell_of(added, q, k)).to(tl.float32))
    row = b.to(tl.int64) * added.batch + h.to(tl.int64) * added.head
    row += q.to(tl.int64) * added.query
    inside = (q < n.queries) & (k < n.keys)
    return lifted(tl.load(added.ptr + row + k * added.key, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def lifted(bias):
    """In units of log 2 the least numbers would be minus infinity."""
    return tl.where((bias < LOWEST) & (bias > float("-inf")), LOWEST, bias)


@triton.jit
def distance_of(added, q, k):
    """In float32, which counts tokens exactly as far as calls are taken (refusals.py). Places are
    converted one by one, not pair by pair: that takes four times as long as a multiplication."""
    return tl.abs(k.to(tl.float32) - (q + added.offset).to(tl.float32))


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
def mixed_word(word):
    """As `dropping._mixed`: the finaliser of MurmurHash3."""
    word = word + GOLDEN
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def kept(drop, b, h, q, k):
    """Which weights dropout keeps, as `dropping.kept`."""
    word = mixed_word(drop.seed.to(tl.uint32) + b.to(tl.uint32))
    word = mixed_word(mixed_word(word + h.to(tl.uint32)) + q.to(tl.uint32))
    return mixed_word(word + k.to(tl.uint32)) >= drop.threshold.to(tl.uint32)


@triton.jit
def finite_only(t):
    """0 in place of NaN and infinity."""
    wide = t.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(t.dtype)


@triton.jit
def spoilt(
    flags, out, n, b, h, first, tiles, E: tl.constexpr, BE: tl.constexpr, MANY: tl.constexpr
):
    """Whether a masked NaN may have leaked into one of MANY tiles from `first` on.

    There is one flag per tile. Without flags the last row of the output tells: a causal mask
    masks nothing in it, so if it is finite there is no NaN that could have leaked.
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
    """Whether a tile was flagged; without flags every tile counts as flagged."""
    here = tile >= 0
    if flags is not None:
        here = tl.load(flags + tl.program_id(1) * tiles + tile) != 0
    return here
