"""The kernel of the forward pass.

A program takes a segment of queries, and a block of the values' columns. It begins with the sum of
all keys before the segment, and goes along it some tokens at a time: pairs within these are taken
as a small matrix, everything earlier is in the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.documents import (
    numbers_of,
    pairs_of,
    rows_of,
    run_at_end,
    run_before,
)
from regard.backends.triton.linear.feature_maps import (
    count_of,
    load_features,
    load_part,
    operand,
    store_part,
)
from regard.backends.triton.linear.states import load_state
from regard.backends.triton.pairs import product


@launched
@triton.jit
def outputs(
    q, k, v, limits, runs, states, out, total, n, segment, segments,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and the sum of weights of a segment of queries."""
    s, block = tl.program_id(0), tl.program_id(2)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    g = h // n.group
    bg = b * (n.heads // n.group) + g
    there = count_of(limits, n.keys, b)
    m, e = tl.arange(0, BM), block * BE + tl.arange(0, BE)
    # Past the last value lies the sum of the features: no column of this block.
    state = load_state(states, bg, s, segments, m[:, None], e[None, :], M, E, CAUSAL)
    state = tl.where((e < E)[None, :], state, 0.0)
    sums = load_state(states, bg, s, segments, m, m * 0 + E, M, E, CAUSAL)
    for start in range(s * segment, tl.minimum((s + 1) * segment, n.queries), BN):
        qs = load_features(q, b, h, start, n.queries, 0, M, BM, BN, MAP, NARROW)
        mixed = product(qs, operand(state, NARROW), None, PRECISION)
        whole = tl.sum(qs.to(tl.float32) * sums[None, :], 1)
        row = start + tl.arange(0, BN)
        if runs is not None:
            run = run_before(runs, b, n.keys, start)
            mixed = rows_of(mixed, runs, b, n.keys, row, run)
            whole = numbers_of(whole, runs, b, n.keys, row, run)
        if CAUSAL:
            ks = load_features(k, b, g, start, there, 0, M, BM, BN, MAP, NARROW)
            vs, _ = load_part(v, b, g, start, there, block * BE, E, BE, BN)
            vs = operand(vs, NARROW)
            weights = product(qs, ks.T, None, PRECISION)
            weights = tl.where(row[:, None] >= row[None, :], weights, 0.0)
            weights = pairs_of(weights, runs, b, n.keys, row)
            whole += tl.sum(weights, 1)
            mixed = product(operand(weights, NARROW), vs, mixed, PRECISION)
            if runs is not None:
                end = run_at_end(runs, b, n.keys, start + BN)
                ks = rows_of(ks, runs, b, n.keys, row, end)
                vs = rows_of(vs, runs, b, n.keys, row, end)
                goes_on = end == run_before(runs, b, n.keys, start)
                state, sums = tl.where(goes_on, state, 0.0), tl.where(goes_on, sums, 0.0)
            state = product(ks.T, vs, state, PRECISION)
            sums += tl.sum(ks.to(tl.float32), 0)
        # A query whose features meet no key's gives 0.
        mixed = tl.where(
            (whole == 0)[:, None], 0.0, mixed / tl.where(whole == 0, 1.0, whole)[:, None]
        )
        store_part(out, mixed, b, h, start, n.queries, block * BE, E, BE, BN)
        at = (b * n.heads + h).to(tl.int64) * n.queries + row
        if block == 0:
            tl.store(total + at, whole, mask=row < n.queries)
