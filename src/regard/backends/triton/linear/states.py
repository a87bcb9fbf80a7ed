"""Sums of key-value products: of every segment, and of all segments before each.

A state is [M, E + 1] numbers: Σ φ(k) vᵀ and, as one more column, Σ φ(k).
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.documents import (
    numbers_of,
    rows_of,
    run_at,
    run_at_end,
    run_before,
    run_behind,
)
from regard.backends.triton.linear.feature_maps import (
    count_of,
    load_features,
    load_part,
    operand,
)
from regard.backends.triton.pairs import product


@launched
@triton.jit
def segment_sums(
    x, y, limits, runs, factor, extra, sums, count, heads, groups, segment,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    MAP: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ φ(x) (f y, e)ᵀ over the tokens of a segment and the heads of a group. Without factors f is
    1, and so is e: x are keys then, and y values. Of documents only the one counts in which the
    segment ends; or begins, with factors, as tokens then go backwards."""
    s, block = tl.program_id(0), tl.program_id(2)
    b, g = tl.program_id(1) // groups, tl.program_id(1) % groups
    there = count_of(limits, count, b)
    mixed = tl.zeros((BM, BE), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    run = 0
    if runs is not None:
        if factor is not None:
            run = run_at(runs, b, count, s * segment)
        else:
            run = run_at_end(runs, b, count, (s + 1) * segment)
    for r in range(heads // groups):
        h = g * (heads // groups) + r
        for start in range(s * segment, tl.minimum((s + 1) * segment, there), BN):
            xs = load_features(x, b, h, start, there, 0, M, BM, BN, MAP, NARROW)
            ys, _ = load_part(y, b, h, start, there, block * BE, E, BE, BN)
            row = start + tl.arange(0, BN)
            xs = rows_of(xs, runs, b, count, row, run)
            ys = rows_of(ys, runs, b, count, row, run)
            if factor is not None:
                at = (b * heads + h).to(tl.int64) * count + row
                e = tl.load(extra + at, mask=row < there, other=0.0)
                f = tl.load(factor + at, mask=row < there, other=0.0)
                e = numbers_of(e, runs, b, count, row, run)
                f = numbers_of(f, runs, b, count, row, run)
                total += tl.sum(xs.to(tl.float32) * e[:, None], 0)
                xs = operand(xs.to(tl.float32) * f[:, None], NARROW)
            else:
                total += tl.sum(xs.to(tl.float32), 0)
            mixed = product(xs.T, operand(ys, NARROW), mixed, PRECISION)
    at = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + s) * (M * (E + 1))
    m, e = tl.arange(0, BM), block * BE + tl.arange(0, BE)
    inside = (m < M)[:, None] & (e < E)[None, :]
    tl.store(sums + at + m[:, None] * (E + 1) + e[None, :], mixed, mask=inside)
    if block == 0:
        tl.store(sums + at + m * (E + 1) + E, total, mask=m < M)


@launched
@triton.jit
def carry(
    sums, first, last, runs, segments, size, groups, count, segment,
    BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place of the sum of each segment, the sum of all before it and of `first`; or of all
    behind it. `last` is the sum of all. A segment in which a document begins drops what came before
    it, and backwards, one in which it ends what comes behind."""
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = own < size
    bg = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    if first is not None:
        total = tl.load(first + bg * size + own, mask=inside, other=0.0)
    for i in tl.range(0, segments, num_stages=3):
        s = segments - 1 - i if BACKWARDS else i
        at = sums + (bg * segments + s) * size + own
        here = tl.load(at, mask=inside, other=0.0)
        tl.store(at, total, mask=inside)
        if runs is not None:
            b = tl.program_id(0) // groups
            if BACKWARDS:
                begins = run_at(runs, b, count, s * segment)
                ends = run_behind(runs, b, count, (s + 1) * segment)
            else:
                begins = run_before(runs, b, count, s * segment)
                ends = run_at_end(runs, b, count, (s + 1) * segment)
            total = tl.where(begins == ends, total, 0.0)
        total += here
    if BACKWARDS:
        if runs is not None:
            # The state that the sequence begins with is of document 0.
            total = tl.where(run_at(runs, tl.program_id(0) // groups, count, 0) == 0, total, 0.0)
    tl.store(last + bg * size + own, total, mask=inside)


@triton.jit
def load_state(
    states, bg, s, segments, m, e, M: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr
):
    """Some entries of the state that a segment begins with, at m and e, which broadcast; without
    an order there is one state for all segments."""
    at = bg.to(tl.int64)
    if CAUSAL:
        at = at * segments + s
    inside = (m < M) & (e <= E)
    return tl.load(states + at * (M * (E + 1)) + m * (E + 1) + e, mask=inside, other=0.0)
