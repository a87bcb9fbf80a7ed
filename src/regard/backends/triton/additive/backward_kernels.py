"""The kernels of the backward pass, as those for dot products: one owns a tile of keys, the other a
tile of queries. With ds the gradient of a pair's logit and t its units,

    dq = Σ ds w (1 - t²)   over keys        dk = Σ ds w (1 - t²)   over queries
    dw = Σ ds t            over all pairs, added up for each tile of queries.

A sum over one axis of a tile is a column of what is owned: it is put there by a comparison.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.additive.units import SMALL, logits_of_units, place_of, unit_and_slope
from regard.backends.triton.gradients.row_numbers import numbers_of, store_rows
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import LN2, kept, load_rows, logits_of, product
from regard.backends.triton.rules import allowed, full_at, keys_for, part_at, rows_for


@triton.jit
def _met(ds, factor):
    """0 where nothing is learned, also beside NaN."""
    return tl.where(ds == 0, 0.0, ds * factor)


@triton.jit
def _seen(rule, q, k, inside, there, partial, limit, table, BM: tl.constexpr, BN: tl.constexpr):
    """Which pairs of a tile count. As numbers where branches meet: booleans Triton 3.6 does not
    bring from there into the layout of a product."""
    seen = (inside & there).to(tl.int32)
    if partial:
        seen *= allowed(rule, q, k, limit, table, BM, BN).to(tl.int32)
    return seen != 0


@triton.jit
def _weights_and_slopes(s, dp, numbers, rows, seen, bias, scoring, drop, b, h, q, k, n):
    """The weights as they multiplied the values, and the gradients of the sums of units."""
    norm, inverse, shift, g_entropy, expected = numbers
    s, bend = logits_of(s, scoring, bias, b, h, q, k, n)
    s = tl.where(seen, s, float("-inf")) - norm
    p = tl.exp2(s) * inverse
    met = p
    if drop.on:
        keeps = kept(drop, b, h, q, k)
        met = tl.where(keeps, p * drop.grow, 0.0)
        dp = tl.where(keeps, dp * drop.grow, 0.0)
    ds = dp - shift
    if rows.entropy is not None:
        ds -= g_entropy * tl.where(p == 0, 0.0, s * LN2 + expected)
    # A masked NaN among the values is in dp.
    return met, _met(tl.where(seen, p * ds, 0.0), bend)


@launched
@triton.jit
def additive_keys(
    q, k, v, g_out, dk, dv, rows, units, rule, bias, drop, scoring, n,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, from all query heads of their group."""
    tile = tl.program_id(0)
    groups = n.heads // n.group
    b, g = tl.program_id(1) // groups, tl.program_id(1) % groups
    first = tile * BN
    last = tl.minimum(first + BN, n.keys) - 1
    column = first + tl.arange(0, BN)
    key, there = column[:, None], (column < n.keys)[:, None]
    ks = place_of(k, b, g, key)
    vs = load_rows(v, b, g, first, n.keys, E, BE, BN, False)
    small = tl.load(units.span) < SMALL
    empty = tl.zeros((BN, BM), tl.float32)
    sum_k = tl.zeros((BN, BD), tl.float32)
    sum_v = tl.zeros((BN, BE), tl.float32)
    unit = tl.arange(0, BD)[None, :]
    for member in range(n.group):
        h = g * n.group + member
        full, part, limit, path = rows_for(rule, n, b, h, tile, first, last, BM)
        for i in range(full + part):
            table = 0
            if i < full:
                start = full_at(rule, path, i, BM)
            else:
                start, table = part_at(rule, path, i - full, BM)
            row = start + tl.arange(0, BM)
            place, inside = row[None, :], (row < n.queries)[None, :]
            heads = (h + tl.zeros_like(row))[None, :]
            qs = place_of(q, b, h, place)
            gs = load_rows(g_out, b, h, start, n.queries, E, BE, BM, False)
            at = (b * n.heads + h).to(tl.int64) * n.queries + row
            norm, inverse, shift, heat, expected = numbers_of(rows, at, row < n.queries)
            numbers = (
                norm[None, :], inverse[None, :], shift[None, :], heat[None, :], expected[None, :]
            )  # fmt: skip
            s = logits_of_units(qs, ks, q.row, k.row, units, h, inside, there, empty, small, D)
            dp = product(vs, gs.T, None, PRECISION)
            seen = _seen(rule, place, key, inside, there, i >= full, limit, table, BM, BN)
            met, ds = _weights_and_slopes(
                s, dp, numbers, rows, seen, bias, scoring, drop, b, heads, place, key, n
            )
            sum_v = product(met.to(gs.dtype), gs, sum_v, PRECISION)
            for d in range(D):
                _, slope = unit_and_slope(qs, ks, q.row, k.row, d, inside, there, small)
                w = tl.load(units.w + h * units.head + d)
                sum_k += tl.where(unit == d, tl.sum(_met(ds, slope), 1)[:, None] * w, 0.0)
    store_rows(dk, sum_k, b, g, first, n.keys, D, BD, BN)
    store_rows(dv, sum_v, b, g, first, n.keys, E, BE, BN)


@launched
@triton.jit
def additive_queries(
    q, k, v, g_out, dq, dw, rows, units, rule, bias, drop, scoring, n,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and its pairs' part of the gradient of the weights."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    g = h // n.group
    first = tile * BM
    last = tl.minimum(first + BM, n.queries) - 1
    row = first + tl.arange(0, BM)
    place, inside = row[:, None], (row < n.queries)[:, None]
    heads = (h + tl.zeros_like(row))[:, None]
    qs = place_of(q, b, h, place)
    gs = load_rows(g_out, b, h, first, n.queries, E, BE, BM, False)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    norm, inverse, shift, heat, expected = numbers_of(rows, at, row < n.queries)
    numbers = (
        norm[:, None], inverse[:, None], shift[:, None], heat[:, None], expected[:, None]
    )  # fmt: skip
    small = tl.load(units.span) < SMALL
    empty = tl.zeros((BM, BN), tl.float32)
    total = tl.zeros((BM, BD), tl.float32)
    learned = tl.zeros((BM, BD), tl.float32)
    unit = tl.arange(0, BD)
    full, part, limit, path = keys_for(rule, n, b, h, tile, first, last, BN)
    for i in range(full + part):
        table = 0
        if i < full:
            start = full_at(rule, path, i, BN)
        else:
            start, table = part_at(rule, path, i - full, BN)
        key = (start + tl.arange(0, BN))[None, :]
        there = key < n.keys
        ks = place_of(k, b, g, key)
        vs = load_rows(v, b, g, start, n.keys, E, BE, BN, False)
        s = logits_of_units(qs, ks, q.row, k.row, units, h, inside, there, empty, small, D)
        dp = product(gs, vs.T, None, PRECISION)
        seen = _seen(rule, place, key, inside, there, i >= full, limit, table, BM, BN)
        _, ds = _weights_and_slopes(
            s, dp, numbers, rows, seen, bias, scoring, drop, b, heads, place, key, n
        )
        for d in range(D):
            t, slope = unit_and_slope(qs, ks, q.row, k.row, d, inside, there, small)
            mine = unit[None, :] == d
            total += tl.where(mine, tl.sum(_met(ds, slope), 1)[:, None], 0.0)
            learned += tl.where(mine, tl.sum(_met(ds, t), 1)[:, None], 0.0)
    w = tl.load(units.w + h * units.head + unit, mask=unit < D, other=0.0)
    store_rows(dq, total * w[None, :], b, h, first, n.queries, D, BD, BM)
    at = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile) * D + unit
    tl.store(dw + at, tl.sum(learned, 0), mask=unit < D)
