"""The kernels of the backward pass: one for each of queries, keys and values.

With t the sum of a row's weights, f = 1 / t, g the gradient of its output and e that of t in all
(through the output too), the weight a pair had before division has the gradient f g·v + e. So

    dφ(q) = Σ φ(k) (f g·v + e)     dφ(k) = Σ φ(q) (f g·v + e)     dv = Σ φ(q)·φ(k) f g

where the first sum runs over keys up to the query: a state of keys, as in the forward pass. The
others run over queries from the key on: a state of queries, Σ φ(q) (f g, e)ᵀ, going backwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.documents import (
    numbers_of,
    pairs_of,
    rows_of,
    run_at,
    run_at_end,
    run_before,
    run_behind,
)
from regard.backends.triton.linear.feature_maps import (
    count_of,
    load_features,
    load_operand,
    load_part,
    operand,
    slope,
    store_part,
)
from regard.backends.triton.linear.states import load_state
from regard.backends.triton.pairs import load_rows, product


@launched
@triton.jit
def row_numbers(
    g, out, total, pulled, factor, extra, n, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr
):
    """f and e of every row; `pulled` is the gradient of t itself."""
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    start = tl.program_id(0) * BN
    row = start + tl.arange(0, BN)
    at = (b * n.heads + h).to(tl.int64) * n.queries + row
    inside = row < n.queries
    gs = load_rows(g, b, h, start, n.queries, E, BE, BN, False).to(tl.float32)
    outs = load_rows(out, b, h, start, n.queries, E, BE, BN, False).to(tl.float32)
    t = tl.load(total + at, mask=inside, other=0.0)
    f = tl.where(t == 0, 0.0, 1.0 / tl.where(t == 0, 1.0, t))
    e = -f * tl.sum(gs * outs, 1)
    if pulled is not None:
        e += tl.load(pulled + at, mask=inside, other=0.0)
    tl.store(factor + at, f, mask=inside)
    tl.store(extra + at, e, mask=inside)


@triton.jit
def _numbers(factor, extra, b, h, row, n):
    at = (b * n.heads + h).to(tl.int64) * n.queries + row
    inside = row < n.queries
    f = tl.load(factor + at, mask=inside, other=0.0)
    return f, tl.load(extra + at, mask=inside, other=0.0)


@launched
@triton.jit
def query_gradients(
    q, k, v, g, limits, runs, states, factor, extra, dq, n, segment, segments,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A segment of queries, and a block of BM of their columns. States are held turned: [E, M]."""
    s, block = tl.program_id(0), tl.program_id(2)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    c = h // n.group
    bg = b * (n.heads // n.group) + c
    there = count_of(limits, n.keys, b)
    m, e = block * BM + tl.arange(0, BM), tl.arange(0, BE)
    state = load_state(states, bg, s, segments, m[None, :], e[:, None], M, E, CAUSAL)
    state = tl.where((e < E)[:, None], state, 0.0)
    sums = load_state(states, bg, s, segments, m, m * 0 + E, M, E, CAUSAL)
    for start in range(s * segment, tl.minimum((s + 1) * segment, n.queries), BN):
        row = start + tl.arange(0, BN)
        f, e_row = _numbers(factor, extra, b, h, row, n)
        gs = load_operand(g, b, h, start, n.queries, E, BE, BN, NARROW)
        found = product(gs, operand(state, NARROW), None, PRECISION) * f[:, None]
        found += e_row[:, None] * sums[None, :]
        if runs is not None:
            found = rows_of(found, runs, b, n.keys, row, run_before(runs, b, n.keys, start))
        if CAUSAL:
            ks = load_features(k, b, c, start, there, block * BM, M, BM, BN, MAP, NARROW)
            vs = load_operand(v, b, c, start, there, E, BE, BN, NARROW)
            pulls = product(gs, vs.T, None, PRECISION) * f[:, None] + e_row[:, None]
            pulls = tl.where(row[:, None] >= row[None, :], pulls, 0.0)
            pulls = pairs_of(pulls, runs, b, n.keys, row)
            found = product(operand(pulls, NARROW), ks, found, PRECISION)
            if runs is not None:
                end = run_at_end(runs, b, n.keys, start + BN)
                ks = rows_of(ks, runs, b, n.keys, row, end)
                vs = rows_of(vs, runs, b, n.keys, row, end)
                goes_on = end == run_before(runs, b, n.keys, start)
                state, sums = tl.where(goes_on, state, 0.0), tl.where(goes_on, sums, 0.0)
            state = product(vs.T, ks, state, PRECISION)
            sums += tl.sum(ks.to(tl.float32), 0)
        raw, _ = load_part(q, b, h, start, n.queries, block * BM, M, BM, BN)
        found *= slope(raw, MAP)
        store_part(dq, found, b, h, start, n.queries, block * BM, M, BM, BN)


@launched
@triton.jit
def key_gradients(
    q, k, v, g, limits, runs, states, factor, extra, dk, n, segment, segments,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A segment of keys, from its end, and a block of BM of their columns."""
    s, block = tl.program_id(0), tl.program_id(2)
    groups = n.heads // n.group
    b, c = tl.program_id(1) // groups, tl.program_id(1) % groups
    there = count_of(limits, n.keys, b)
    m, e = block * BM + tl.arange(0, BM), tl.arange(0, BE)
    state = load_state(states, b * groups + c, s, segments, m[None, :], e[:, None], M, E, CAUSAL)
    state = tl.where((e < E)[:, None], state, 0.0)
    sums = load_state(states, b * groups + c, s, segments, m, m * 0 + E, M, E, CAUSAL)
    stop = tl.minimum((s + 1) * segment, n.keys)
    many = (stop - s * segment + BN - 1) // BN
    for i in range(many):
        start = s * segment + (many - 1 - i) * BN
        row = start + tl.arange(0, BN)
        vs = load_operand(v, b, c, start, there, E, BE, BN, NARROW)
        found = product(vs, operand(state, NARROW), None, PRECISION) + sums[None, :]
        first = 0
        if runs is not None:
            first, behind = run_at(runs, b, n.keys, start), run_behind(runs, b, n.keys, start + BN)
            found = rows_of(found, runs, b, n.keys, row, behind)
            state = tl.where(first == behind, state, 0.0)
            sums = tl.where(first == behind, sums, 0.0)
        if CAUSAL:
            for r in range(n.group):
                h = c * n.group + r
                f, e_row = _numbers(factor, extra, b, h, row, n)
                gs = load_operand(g, b, h, start, n.queries, E, BE, BN, NARROW)
                qs = load_features(q, b, h, start, n.queries, block * BM, M, BM, BN, MAP, NARROW)
                pulls = product(vs, gs.T, None, PRECISION) * f[None, :] + e_row[None, :]
                pulls = tl.where(row[:, None] <= row[None, :], pulls, 0.0)
                pulls = pairs_of(pulls, runs, b, n.keys, row)
                found = product(operand(pulls, NARROW), qs, found, PRECISION)
                f = numbers_of(f, runs, b, n.keys, row, first)
                e_row = numbers_of(e_row, runs, b, n.keys, row, first)
                wide = rows_of(qs.to(tl.float32), runs, b, n.keys, row, first)
                gs = rows_of(gs, runs, b, n.keys, row, first)
                state = product(gs.T, operand(wide * f[:, None], NARROW), state, PRECISION)
                sums += tl.sum(wide * e_row[:, None], 0)
        raw, _ = load_part(k, b, c, start, there, block * BM, M, BM, BN)
        # What is not seen learns nothing.
        found = tl.where((row < there)[:, None], found * slope(raw, MAP), 0.0)
        store_part(dk, found, b, c, start, n.keys, block * BM, M, BM, BN)


@launched
@triton.jit
def value_gradients(
    q, k, g, limits, runs, states, factor, dv, n, segment, segments,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A segment of values, from its end, and a block of BE of their columns."""
    s, block = tl.program_id(0), tl.program_id(2)
    groups = n.heads // n.group
    b, c = tl.program_id(1) // groups, tl.program_id(1) % groups
    there = count_of(limits, n.keys, b)
    m, e = tl.arange(0, BM), block * BE + tl.arange(0, BE)
    state = load_state(states, b * groups + c, s, segments, m[:, None], e[None, :], M, E, CAUSAL)
    state = tl.where((e < E)[None, :], state, 0.0)
    stop = tl.minimum((s + 1) * segment, n.keys)
    many = (stop - s * segment + BN - 1) // BN
    for i in range(many):
        start = s * segment + (many - 1 - i) * BN
        row = start + tl.arange(0, BN)
        ks = load_features(k, b, c, start, there, 0, M, BM, BN, MAP, NARROW)
        found = product(ks, operand(state, NARROW), None, PRECISION)
        first = 0
        if runs is not None:
            first, behind = run_at(runs, b, n.keys, start), run_behind(runs, b, n.keys, start + BN)
            found = rows_of(found, runs, b, n.keys, row, behind)
            state = tl.where(first == behind, state, 0.0)
        if CAUSAL:
            for r in range(n.group):
                h = c * n.group + r
                inside = row < n.queries
                at = (b * n.heads + h).to(tl.int64) * n.queries + row
                f = tl.load(factor + at, mask=inside, other=0.0)
                qs = load_features(q, b, h, start, n.queries, 0, M, BM, BN, MAP, NARROW)
                gs, _ = load_part(g, b, h, start, n.queries, block * BE, E, BE, BN)
                gs = operand(gs, NARROW)
                weights = product(ks, qs.T, None, PRECISION) * f[None, :]
                weights = tl.where(row[:, None] <= row[None, :], weights, 0.0)
                weights = pairs_of(weights, runs, b, n.keys, row)
                found = product(operand(weights, NARROW), gs, found, PRECISION)
                f = numbers_of(f, runs, b, n.keys, row, first)
                qs = rows_of(qs, runs, b, n.keys, row, first)
                gs = rows_of(gs, runs, b, n.keys, row, first)
                scaled = operand(qs.to(tl.float32) * f[:, None], NARROW)
                state = product(scaled.T, gs, state, PRECISION)
        store_part(dv, found, b, c, start, n.keys, block * BE, E, BE, BN)
