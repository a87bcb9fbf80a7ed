"""Gradients of queries, and of a bias: a program owns a tile of queries and loops over its keys."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.gradients.row_numbers import (
    numbers_of,
    shift_of,
    store_rows,
    weights_and_slopes,
)
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import (
    ALIBI,
    DENSE,
    RELATIVE,
    cell_of,
    distance_of,
    finite_only,
    flagged,
    load_rows,
    product,
    spoilt,
)
from regard.backends.triton.rules import full_at, keys_for, part_at


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
    _, ds, bend = weights_and_slopes(
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
    tile, tiles, q, k, v, g_out, dq, d_bias, rows, flags, rule, bias, drop, scoring, n, out,
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
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    gs = load_rows(g_out, b, h, first, n.queries, E, BE, BM, False)
    norm, inverse, shift, g_entropy, expected = numbers_of(rows, at, row < n.queries)
    if rows.shift is None:
        shift = shift_of(gs, out, b, h, first, n, E, BE, BM)
    numbers = (
        norm[:, None], inverse[:, None], shift[:, None], g_entropy[:, None], expected[:, None]
    )  # fmt: skip
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
    store_rows(dq, total, b, h, first, n.queries, D, BD, BM)


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
            bias, drop, scoring, n, out, D, E, BD, BE, BM, BN, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        first = tl.program_id(0) * MANY
        b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
        if spoilt(flags, out, n, b, h, first, tiles, E, BE, MANY):
            for tile in range(first, tl.minimum(first + MANY, tiles)):
                if flagged(flags, tiles, tile):
                    _tile_of_queries(
                        tile, tiles, q, k, v, g_out, dq, d_bias, rows, flags, rule, bias, drop,
                        scoring, n, out, D, E, BD, BE, BM, BN, True, PRECISION, 1,
                    )  # fmt: skip
