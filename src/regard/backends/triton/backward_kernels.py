"""The kernels of the backward pass; backward.py says what they compute, and runs them.

`keys_and_values` owns a tile of keys and loops over the queries that attend to it; `queries` owns a
tile of queries and loops over its keys. Both recompute the weights from q, k and the row norms. Or
the first adds to the gradients of queries as well, which `rounded` then writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import (
    ALIBI,
    DENSE,
    INTERPRETED,
    LN2,
    LOG2E,
    NO_BIAS,
    RELATIVE,
    cell_of,
    distance_of,
    finite_only,
    flagged,
    kept,
    load_rows,
    logits_of,
    norms,
    product,
    spoilt,
)
from regard.backends.triton.rules import allowed, full_at, keys_for, part_at, rows_for


class RowNumbers(NamedTuple):
    """Per row [B, H, Q]: norm [2, ...], D, and with a gradient of entropy, that and E; how many
    rows there are; and lse, for where there is no norm."""

    norm: Any
    shift: Any
    entropy: Any
    expected: Any
    rows: Any
    lse: Any


class BiasGradient(NamedTuple):
    """Where the gradient of the bias goes: per row for slopes, else in the bias's own shape."""

    ptr: Any
    batch: Any
    head: Any
    query: Any
    key: Any
    shared: Any
    """Whether several programs add to one element, by atomics."""


@launched
@triton.jit
def row_shift(
    out, g_out, g_lse, shift, n,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, MENDING: tl.constexpr,
):  # fmt: skip
    """D = g_out·out - g_lse, for a tile of rows; if MENDING, only where a masked NaN leaked."""
    b = tl.program_id(1) // n.heads
    h = tl.program_id(1) % n.heads
    if MENDING:
        if not spoilt(None, out, n, b, h, 0, 0, E, BE, 1):
            return
    start = tl.program_id(0) * BM
    o = load_rows(out, b, h, start, n.queries, E, BE, BM, False).to(tl.float32)
    g = load_rows(g_out, b, h, start, n.queries, E, BE, BM, False).to(tl.float32)
    row = start + tl.arange(0, BM)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    total = tl.sum(o * g, 1)
    if g_lse is not None:
        total -= tl.load(g_lse + at, mask=row < n.queries, other=0.0)
    tl.store(shift + at, total, mask=row < n.queries)


@triton.jit
def _numbers(rows, at, inside):
    """The statistics of some rows; rows past the last query get weight 0."""
    shift = tl.load(rows.shift + at, mask=inside, other=0.0)
    if rows.norm is not None:
        norm = tl.load(rows.norm + at, mask=inside, other=0.0)
        inverse = tl.load(rows.norm + rows.rows + at, mask=inside, other=0.0)
    else:
        norm = norms(rows.lse, at, inside)
        inverse = tl.full(norm.shape, 1.0, tl.float32)
    g_entropy, expected = shift, shift
    if rows.entropy is not None:
        g_entropy = tl.load(rows.entropy + at, mask=inside, other=0.0)
        expected = tl.load(rows.expected + at, mask=inside, other=0.0)
    return norm, inverse, shift, g_entropy, expected


@triton.jit
def _weights_and_slopes(
    products, dp, numbers, rows, rule, bias, scoring, drop, b, h, q, k, n, limit, table,
    BM: tl.constexpr, BN: tl.constexpr, PARTIAL: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """The weights as they multiplied the values, ds, and the slope of the soft-cap."""
    norm, inverse, shift, g_entropy, expected = numbers
    # Scale and shift in one instruction, as the forward pass: rounded in between, a logit of 10^5
    # would give a weight that is off by a percent.
    plain: tl.constexpr = scoring.positive and not scoring.capped and bias.kind == NO_BIAS
    factor = scoring.scale * LOG2E if plain else 1.0
    s, bend = products, 1.0
    if not plain:
        s, bend = logits_of(products, scoring, bias, b, h, q, k, n)
    if PARTIAL:
        # A band goes on past the last query, where weight 0 would multiply a NaN of the keys.
        seen = allowed(rule, q, k, limit, table, BM, BN) & (q < n.queries)
        s = tl.where(seen, s, float("-inf"))
    p = tl.exp2(s * factor - norm) * inverse
    met = p
    if drop.on:
        keeps = kept(drop, b, h, q, k)
        met = tl.where(keeps, p * drop.grow, 0.0)
        dp = tl.where(keeps, dp * drop.grow, 0.0)
    ds = dp - shift
    if rows.entropy is not None:
        away = s * (factor * LN2) - expected
        if GUARD or PARTIAL:
            away = tl.where(p == 0, 0.0, away)
        ds -= g_entropy * away
    ds = p * ds
    if PARTIAL:
        # A masked NaN among the values is in dp.
        ds = tl.where(seen, ds, 0.0)
    return met, ds, bend


@triton.jit
def _pull_keys(
    qs, gs, ks, vs, dk, dv, rows, rule, bias, scoring, drop, b, h, start, columns, n, limit, table,
    BM: tl.constexpr, BN: tl.constexpr, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries' part of the gradients of keys and values; and the slopes of its pairs,
    for the gradients of the queries. Keys are rows."""
    row = start + tl.arange(0, BM)
    at = (b * n.heads + h).to(tl.int64) * n.queries + row
    norm, inverse, shift, g_entropy, expected = _numbers(rows, at, row < n.queries)
    numbers = (
        norm[None, :], inverse[None, :], shift[None, :], g_entropy[None, :], expected[None, :]
    )  # fmt: skip
    products = product(ks, qs.T, None, PRECISION)
    dp = product(vs, gs.T, None, PRECISION)
    heads = (h + tl.zeros_like(row))[None, :]
    met, ds, bend = _weights_and_slopes(
        products, dp, numbers, rows, rule, bias, scoring, drop, b, heads, row[None, :],
        columns[:, None], n, limit, table, BM, BN, PARTIAL, bias.kind == DENSE,
    )  # fmt: skip
    dv = product(met.to(gs.dtype), gs, dv, PRECISION)
    slopes = ds * bend
    if CAREFUL:
        qs = finite_only(qs)
        slopes = tl.where(ds == 0, 0.0, slopes)
    slopes = slopes.to(qs.dtype)
    dk = product(slopes, qs, dk, PRECISION)
    return dk, dv, slopes


@triton.jit
def _tile_of_keys(
    tile, tiles, q, k, v, g_out, dq, dk, dv, rows, flags, rule, bias, drop, scoring, n,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and their values, from all query heads of their group; and its
    part of the gradients of queries, added to those of other tiles."""
    groups = n.heads // n.group
    b, g = tl.program_id(1) // groups, tl.program_id(1) % groups
    first = tile * BN
    last = tl.minimum(first + BN, n.keys) - 1
    columns = first + tl.arange(0, BN)
    ks = load_rows(k, b, g, first, n.keys, D, BD, BN, False)
    vs = load_rows(v, b, g, first, n.keys, E, BE, BN, False)
    sum_k = tl.zeros((BN, BD), tl.float32)
    sum_v = tl.zeros((BN, BE), tl.float32)
    for member in range(n.group):
        h = g * n.group + member
        full, part, limit, path = rows_for(rule, n, b, h, tile, first, last, BM)
        for i in tl.range(full, num_stages=STAGES):
            start = full_at(rule, path, i, BM)
            if DESCRIBED:
                qs = q.load([b, h, start, 0]).reshape(BM, BD)
                gs = g_out.load([b, h, start, 0]).reshape(BM, BE)
            else:
                qs = load_rows(q, b, h, start, n.queries, D, BD, BM, True)
                gs = load_rows(g_out, b, h, start, n.queries, E, BE, BM, True)
            sum_k, sum_v, slopes = _pull_keys(
                qs, gs, ks, vs, sum_k, sum_v, rows, rule, bias, scoring, drop, b, h, start,
                columns, n, limit, 0, BM, BN, False, CAREFUL, PRECISION,
            )  # fmt: skip
            if dq is not None:
                _add_to_queries(
                    dq, slopes, ks, columns, b, h, start, n, D, BD, BM, PRECISION, DESCRIBED
                )
        for i in tl.range(part, num_stages=STAGES):
            start, table = part_at(rule, path, i, BM)
            if DESCRIBED:
                qs = q.load([b, h, start, 0]).reshape(BM, BD)
                gs = g_out.load([b, h, start, 0]).reshape(BM, BE)
            else:
                qs = load_rows(q, b, h, start, n.queries, D, BD, BM, False)
                gs = load_rows(g_out, b, h, start, n.queries, E, BE, BM, False)
            sum_k, sum_v, slopes = _pull_keys(
                qs, gs, ks, vs, sum_k, sum_v, rows, rule, bias, scoring, drop, b, h, start,
                columns, n, limit, table, BM, BN, True, CAREFUL, PRECISION,
            )  # fmt: skip
            if dq is not None:
                _add_to_queries(
                    dq, slopes, ks, columns, b, h, start, n, D, BD, BM, PRECISION, DESCRIBED
                )
    sum_k *= scoring.scale
    if not CAREFUL and flags is not None:
        found = tl.max(tl.max((sum_k != sum_k).to(tl.int32), 1), 0).to(tl.int8)
        tl.store(flags + tl.program_id(1) * tiles + tile, found)
    _store_rows(dk, sum_k, b, g, first, n.keys, D, BD, BN)
    _store_rows(dv, sum_v, b, g, first, n.keys, E, BE, BN)


@triton.jit
def _add_to_queries(
    sums, slopes, ks, columns, b, h, start, n, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Add a tile's part to gradients of queries that other programs add to as well: by the copy
    engine, or by atomics."""
    # Past the last key there are zeros, whose weights may be infinite beside very small logits.
    slopes = tl.where((columns < n.keys)[:, None], slopes, 0.0).to(ks.dtype)
    t = product(slopes.T, ks, None, PRECISION)
    if DESCRIBED and not INTERPRETED:
        sums.atomic_add([b, h, start, 0], t.reshape(1, 1, BM, BD))
    else:
        row, column = start + tl.arange(0, BM), tl.arange(0, BD)
        at = sums.ptr + b.to(tl.int64) * sums.batch + h.to(tl.int64) * sums.head
        at += row.to(tl.int64)[:, None] * sums.row + column[None, :]
        inside = (row < n.queries)[:, None] & (column < D)[None, :]
        tl.atomic_add(at, t, mask=inside, sem="relaxed")


@launched
@triton.jit
def rounded(
    sums, dq, flags, scoring, n, tiles, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr
):
    """The gradients of a tile of queries from their sums in float32; and whether a masked NaN may
    have leaked into it."""
    tile = tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    total = load_rows(sums, b, h, tile * BM, n.queries, D, BD, BM, False) * scoring.scale
    if flags is not None:
        found = tl.max(tl.max((total != total).to(tl.int32), 1), 0).to(tl.int8)
        tl.store(flags + tl.program_id(1) * tiles + tile, found)
    _store_rows(dq, total, b, h, tile * BM, n.queries, D, BD, BM)


@launched
@triton.jit
def keys_and_values(
    q, k, v, g_out, dq, dk, dv, rows, flags, rule, bias, drop, scoring, n, out, tiles,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MANY: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A tile of keys; or, of MANY tiles, those where a masked NaN may have leaked, with checks.
    (Without flags there is one query head per key head: the output of its last query tells.)"""
    if MANY == 0:
        _tile_of_keys(
            tl.program_id(0), tiles, q, k, v, g_out, dq, dk, dv, rows, flags, rule, bias, drop,
            scoring, n, D, E, BD, BE, BM, BN, False, PRECISION, STAGES, DESCRIBED,
        )  # fmt: skip
    else:
        first = tl.program_id(0) * MANY
        b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
        if spoilt(flags, out, n, b, h, first, tiles, E, BE, MANY):
            for tile in range(first, tl.minimum(first + MANY, tiles)):
                if flagged(flags, tiles, tile):
                    _tile_of_keys(
                        tile, tiles, q, k, v, g_out, None, dk, dv, rows, flags, rule, bias, drop,
                        scoring, n, D, E, BD, BE, BM, BN, True, PRECISION, 1, False,
                    )  # fmt: skip


@triton.jit
def _store_rows(
    sheet, t, b, h, start, count, width: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr
):
    row, column = start + tl.arange(0, N), tl.arange(0, WIDE)
    at = sheet.ptr + b.to(tl.int64) * sheet.batch + h.to(tl.int64) * sheet.head
    at += row.to(tl.int64)[:, None] * sheet.row + column[None, :]
    inside = (row < count)[:, None] & (column < width)[None, :]
    tl.store(at, t.to(sheet.ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pull_query(
    qs, gs, ks, vs, dq, slopes, d_bias, numbers, rows, rule, bias, scoring, drop, b, h, place, key,
    n, limit, table,
    BM: tl.constexpr, BN: tl.constexpr, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys' part of the gradients of queries and bias."""
    columns = (key + tl.arange(0, BN))[None, :]
    products = product(qs, ks.T, None, PRECISION)
    dp = product(gs, vs.T, None, PRECISION)
    _, ds, bend = _weights_and_slopes(
        products, dp, numbers, rows, rule, bias, scoring, drop, b, h, place, columns, n, limit,
        table, BM, BN, PARTIAL, bias.kind == DENSE,
    )  # fmt: skip
    # A second run, with checks, must not count the bias again.
    if d_bias.ptr is not None and not CAREFUL:
        inside = (place < n.queries) & (columns < n.keys)
        if bias.kind == ALIBI:
            slopes -= tl.sum(ds * distance_of(bias, place, columns), 1)
        if bias.kind == RELATIVE:
            at = d_bias.ptr + h * d_bias.head + cell_of(bias, place, columns)
            tl.atomic_add(at, ds, mask=inside)
        if bias.kind == DENSE:
            at = b.to(tl.int64) * d_bias.batch + h.to(tl.int64) * d_bias.head
            at += place.to(tl.int64) * d_bias.query
            at = d_bias.ptr + at + columns * d_bias.key
            if d_bias.shared:
                tl.atomic_add(at, ds, mask=inside)
            else:
                tl.store(at, ds, mask=inside)
    given = ds * bend
    if CAREFUL:
        ks = finite_only(ks)
        given = tl.where(ds == 0, 0.0, given)
    dq = product(given.to(ks.dtype), ks, dq, PRECISION)
    return dq, slopes


@triton.jit
def _tile_of_queries(
    tile, tiles, q, k, v, g_out, dq, d_bias, rows, flags, rule, bias, drop, scoring, n,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and its pairs' part of the gradient of the bias."""
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    g = h // n.group
    first = tile * BM
    last = tl.minimum(first + BM, n.queries) - 1
    row = first + tl.arange(0, BM)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    norm, inverse, shift, g_entropy, expected = _numbers(rows, at, row < n.queries)
    numbers = (
        norm[:, None], inverse[:, None], shift[:, None], g_entropy[:, None], expected[:, None]
    )  # fmt: skip
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    gs = load_rows(g_out, b, h, first, n.queries, E, BE, BM, False)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    total = tl.zeros((BM, BD), tl.float32)
    slopes = tl.zeros((BM,), tl.float32)
    full, part, limit, path = keys_for(rule, n, b, h, tile, first, last, BN)
    for i in tl.range(full, num_stages=STAGES):
        key = full_at(rule, path, i, BN)
        ks = load_rows(k, b, g, key, n.keys, D, BD, BN, True)
        vs = load_rows(v, b, g, key, n.keys, E, BE, BN, True)
        total, slopes = _pull_query(
            qs, gs, ks, vs, total, slopes, d_bias, numbers, rows, rule, bias, scoring, drop, b,
            heads, place, key, n, limit, 0, BM, BN, False, CAREFUL, PRECISION,
        )  # fmt: skip
    for i in tl.range(part, num_stages=STAGES):
        key, table = part_at(rule, path, i, BN)
        ks = load_rows(k, b, g, key, n.keys, D, BD, BN, False)
        vs = load_rows(v, b, g, key, n.keys, E, BE, BN, False)
        total, slopes = _pull_query(
            qs, gs, ks, vs, total, slopes, d_bias, numbers, rows, rule, bias, scoring, drop, b,
            heads, place, key, n, limit, table, BM, BN, True, CAREFUL, PRECISION,
        )  # fmt: skip
    total *= scoring.scale
    if not CAREFUL:
        if flags is not None:
            found = tl.max(tl.max((total != total).to(tl.int32), 1), 0).to(tl.int8)
            tl.store(flags + tl.program_id(1) * tiles + tile, found)
        if d_bias.ptr is not None and bias.kind == ALIBI:
            tl.store(d_bias.ptr + at, slopes, mask=row < n.queries)
    _store_rows(dq, total, b, h, first, n.queries, D, BD, BM)


@launched
@triton.jit
def queries(
    q, k, v, g_out, dq, d_bias, rows, flags, rule, bias, drop, scoring, n, out, tiles,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """A tile of queries; or, of MANY tiles, those where a masked NaN may have leaked."""
    if MANY == 0:
        _tile_of_queries(
            tiles - 1 - tl.program_id(0), tiles, q, k, v, g_out, dq, d_bias, rows, flags, rule,
            bias, drop, scoring, n, D, E, BD, BE, BM, BN, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        first = tl.program_id(0) * MANY
        b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
        if spoilt(flags, out, n, b, h, first, tiles, E, BE, MANY):
            for tile in range(first, tl.minimum(first + MANY, tiles)):
                if flagged(flags, tiles, tile):
                    _tile_of_queries(
                        tile, tiles, q, k, v, g_out, dq, d_bias, rows, flags, rule, bias, drop,
                        scoring, n, D, E, BD, BE, BM, BN, True, PRECISION, 1,
                    )  # fmt: skip
