"""What every kernel does with a chunk of C tokens: its decays, its numbers, its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.feature_maps import load_part
from regard.backends.triton.pairs import LOG2E

C = tl.constexpr(64)
GONE = tl.constexpr(-160.0)
"""The binary logarithm of a decay that leaves nothing, in float32."""


class Fading(NamedTuple):
    """Sums of the binary logarithms of decays, from the beginning of each chunk: their whole
    numbers, which add up exactly, and the rest. So a strong decay takes no digits from others."""

    whole: Any
    part: Any


@launched
@triton.jit
def running_decays(log_decay, fading, count):
    """The sums of one chunk."""
    row = tl.program_id(0) * C + tl.arange(0, C)
    at = tl.program_id(1).to(tl.int64) * count + row
    x = tl.load(log_decay + at, mask=row < count, other=0.0).to(tl.float32) * LOG2E
    x = tl.where(x < GONE, GONE, x)
    whole = tl.floor(x + 0.5)
    tl.store(fading.whole + at, tl.cumsum(whole, 0), mask=row < count)
    tl.store(fading.part + at, tl.cumsum(x - whole, 0), mask=row < count)


@triton.jit
def fading_at(fading, bg, row, count):
    """Both sums at some tokens; past the last, its own."""
    at = bg.to(tl.int64) * count + tl.minimum(row, count - 1)
    return tl.load(fading.whole + at), tl.load(fading.part + at)


@triton.jit
def left_at(fading, bg, start, count):
    """What is left at each token of a chunk of the state before it."""
    whole, part = fading_at(fading, bg, start + tl.arange(0, C), count)
    return tl.exp2(whole + part)


@triton.jit
def left_of_each(fading, bg, start, count):
    """What is left of each token at the end of its chunk."""
    whole, part = fading_at(fading, bg, start + tl.arange(0, C), count)
    end_whole, end_part = fading_at(fading, bg, start + C - 1, count)
    return tl.exp2((end_whole - whole) + (end_part - part))


@triton.jit
def left_at_end(fading, bg, start, count):
    """What is left at the end of a chunk of the state before it."""
    whole, part = fading_at(fading, bg, start + C - 1, count)
    return tl.exp2(whole + part)


@triton.jit
def fade_pairs(x, fading, bg, row, column, count, DIAGONAL: tl.constexpr):
    """Pairs of a later token (row) with an earlier one (column), faded; 0 in place of others."""
    seen = row[:, None] >= column[None, :] + (0 if DIAGONAL else 1)
    if fading is not None:
        whole, part = fading_at(fading, bg, row, count)
        since_whole, since_part = fading_at(fading, bg, column, count)
        apart = (whole[:, None] - since_whole[None, :]) + (part[:, None] - since_part[None, :])
        x *= tl.exp2(tl.where(seen, apart, 0.0))
    return tl.where(seen, x, 0.0)


@triton.jit
def numbers_at(x, bg, row, count):
    """One number for each token."""
    at = bg.to(tl.int64) * count + row
    return tl.load(x + at, mask=row < count, other=0.0).to(tl.float32)


@triton.jit
def load_chunk(sheet, b, h, start, count, first, width: tl.constexpr, WIDE: tl.constexpr):
    """The tokens of a chunk, and their columns from `first` on."""
    found, _inside = load_part(sheet, b, h, start, count, first, width, WIDE, C)
    return found


@triton.jit
def load_state(states, at, m, e, M: tl.constexpr, E: tl.constexpr):
    """Entries of a state at m and e, which broadcast."""
    base = states + at.to(tl.int64) * (M * E)
    return tl.load(base + m * E + e, mask=(m < M) & (e < E), other=0.0)


@triton.jit
def store_state(states, x, at, m, e, M: tl.constexpr, E: tl.constexpr):
    base = states + at.to(tl.int64) * (M * E)
    tl.store(base + m * E + e, x.to(states.dtype.element_ty), mask=(m < M) & (e < E))
