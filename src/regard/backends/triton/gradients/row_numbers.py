"""What is known of each row in the backward pass, and its weights and slopes."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import (
    LN2,
    LOG2E,
    NO_BIAS,
    kept,
    load_rows,
    logits_of,
    norms,
)
from regard.backends.triton.rules import allowed


class RowNumbers(NamedTuple):
    """Per row [B, H, Q]: norm [2, ...], D unless it is computed where it is used, and with a
    gradient of entropy, that and by how much the shifted logit that is expected lies below 0; how
    many rows there are; and lse, for where there is no norm."""

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
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """D = g_out·out - g_lse, for a tile of rows."""
    b = tl.program_id(1) // n.heads
    h = tl.program_id(1) % n.heads
    start = tl.program_id(0) * BM
    gs = load_rows(g_out, b, h, start, n.queries, E, BE, BM, False)
    total = shift_of(gs, out, b, h, start, n, E, BE, BM)
    row = start + tl.arange(0, BM)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    if g_lse is not None:
        total -= tl.load(g_lse + at, mask=row < n.queries, other=0.0)
    tl.store(shift + at, total, mask=row < n.queries)


@triton.jit
def shift_of(gs, out, b, h, start, n, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """g_out·out of each of some rows."""
    outs = load_rows(out, b, h, start, n.queries, E, BE, BM, False)
    return tl.sum(outs.to(tl.float32) * gs.to(tl.float32), 1)


@triton.jit
def numbers_of(rows, at, inside):
    """The statistics of some rows; rows past the last query get weight 0."""
    shift = tl.zeros(at.shape, tl.float32)
    if rows.shift is not None:
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
def weights_and_slopes(
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
    s = s * factor - norm
    p = tl.exp2(s) * inverse
    met = p
    if drop.on:
        keeps = kept(drop, b, h, q, k)
        met = tl.where(keeps, p * drop.grow, 0.0)
        dp = tl.where(keeps, dp * drop.grow, 0.0)
    ds = dp - shift
    if rows.entropy is not None:
        away = s * LN2 + expected
        if GUARD or PARTIAL:
            away = tl.where(p == 0, 0.0, away)
        ds -= g_entropy * away
    ds = p * ds
    if PARTIAL:
        # A masked NaN among the values is in dp.
        ds = tl.where(seen, ds, 0.0)
    return met, ds, bend


@triton.jit
def store_rows(
    sheet, t, b, h, start, count, width: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr
):
    row, column = start + tl.arange(0, N), tl.arange(0, WIDE)
    at = sheet.ptr + b.to(tl.int64) * sheet.batch + h.to(tl.int64) * sheet.head
    at += row.to(tl.int64)[:, None] * sheet.row + column[None, :]
    inside = (row < count)[:, None] & (column < width)[None, :]
    tl.store(at, t.to(sheet.ptr.dtype.element_ty), mask=inside)
