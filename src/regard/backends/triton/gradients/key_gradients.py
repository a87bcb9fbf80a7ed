"""Gradients of keys and values: a program owns a tile of keys and loops over the queries that
attend to it. It may add to the gradients of queries as well, which `rounded` then writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.gradients.row_numbers import numbers_of, store_rows, weights_and_slopes
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import (
    DENSE,
    INTERPRETED,
    finite_only,
    flagged,
    load_rows,
    product,
    spoilt,
)
from regard.backends.triton.rules import full_at, part_at, rows_for


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
    norm, inverse, shift, g_entropy, expected = numbers_of(rows, at, row < n.queries)
    numbers = (
        norm[None, :], inverse[None, :], shift[None, :], g_entropy[None, :], expected[None, :]
    )  # fmt: skip
    products = product(ks, qs.T, None, PRECISION)
    dp = product(vs, gs.T, None, PRECISION)
    heads = (h + tl.zeros_like(row))[None, :]
    met, ds, bend = weights_and_slopes(
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
    store_rows(dk, sum_k, b, g, first, n.keys, D, BD, BN)
    store_rows(dv, sum_v, b, g, first, n.keys, E, BE, BN)


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
    store_rows(dq, total, b, h, tile * BM, n.queries, D, BD, BM)


@launched
@triton.jit
def keys_and_values(
    q, k, v, g_out, dq, dk, dv, rows, flags, rule, bias, drop, scoring, n, out, tiles,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MANY: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A tile of keys; or, of MANY tiles, those where a masked NaN may have leaked, with checks.
    (Without flags the output of the last query tells, of any head that shares the keys.)"""
    if MANY == 0:
        _tile_of_keys(
            tl.program_id(0), tiles, q, k, v, g_out, dq, dk, dv, rows, flags, rule, bias, drop,
            scoring, n, D, E, BD, BE, BM, BN, False, PRECISION, STAGES, DESCRIBED,
        )  # fmt: skip
    else:
        first = tl.program_id(0) * MANY
        key_heads = n.heads // n.group
        b, h = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads * n.group
        if spoilt(flags, out, n, b, h, first, tiles, E, BE, MANY):
            for tile in range(first, tl.minimum(first + MANY, tiles)):
                if flagged(flags, tiles, tile):
                    _tile_of_keys(
                        tile, tiles, q, k, v, g_out, None, dk, dv, rows, flags, rule, bias, drop,
                        scoring, n, D, E, BD, BE, BM, BN, True, PRECISION, 1, False,
                    )  # fmt: skip
