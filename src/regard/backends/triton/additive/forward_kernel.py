"""The kernel of the forward pass: online softmax as for dot products (the folder above), with
logits of hidden units. What takes the time is the units, so hidden values are always checked."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.additive.units import SMALL, logits_of_units, place_of
from regard.backends.triton.forward_kernels import _spoiled, _take_in, _write_rows, finished
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import (
    LEAST,
    LOG2E,
    NO_BIAS,
    UNSEEN,
    finite_only,
    load_rows,
    logits_of,
)
from regard.backends.triton.rules import TILES, allowed, full_at, keys_for, part_at, sees_some


@launched
@triton.jit
def additive_tiles(
    q, k, v, out, to, units, rule, bias, sink, drop, scoring, n,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STATISTICS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of queries against its keys: full tiles, then partial ones."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    g = h // n.group
    first = tile * BM
    last = tl.minimum(first + BM, n.queries) - 1
    row = first + tl.arange(0, BM)
    place, inside = row[:, None], row < n.queries
    heads = (h + tl.zeros_like(row))[:, None]
    qs = place_of(q, b, h, place)
    small = tl.load(units.span) < SMALL
    empty = tl.zeros((BM, BN), tl.float32)
    mixed = tl.zeros((BM, BE), tl.float32)
    bad = tl.zeros((BM, BE), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    energy = tl.zeros((BM,), tl.float32)
    full, part, limit, path = keys_for(rule, n, b, h, tile, first, last, BN)
    largest = tl.full((BM,), LEAST, tl.float32)
    if bias.kind == NO_BIAS:
        some = (full > 0) | sees_some(rule, tl.minimum(row, n.queries - 1), limit, path[5])
        largest = tl.where(some, UNSEEN, largest)
    for i in range(full + part):
        table = 0
        if i < full:
            key = full_at(rule, path, i, BN)
        else:
            key, table = part_at(rule, path, i - full, BN)
        columns = (key + tl.arange(0, BN))[None, :]
        ks = place_of(k, b, g, columns)
        vs = load_rows(v, b, g, key, n.keys, E, BE, BN, False)
        s = logits_of_units(
            qs, ks, q.row, k.row, units, h, inside[:, None], columns < n.keys, empty, small, D
        )
        s, _ = logits_of(s, scoring, bias, b, heads, place, columns, n)
        if i >= full:
            seen = allowed(rule, place, columns, limit, table, BM, BN)
            s = tl.where(seen, s, float("-inf"))
            if rule.kind == TILES and bias.kind == NO_BIAS:
                met = tl.max(seen.to(tl.int32), 1) > 0
                largest = tl.maximum(largest, tl.where(met, UNSEEN, LEAST))
            bad += _spoiled(seen, vs, PRECISION)
            vs = finite_only(vs)
        mixed, largest, total, energy = _take_in(
            s, 1.0, vs, mixed, largest, total, energy, drop, b, heads, place, columns,
            STATISTICS, True, PRECISION,
        )  # fmt: skip
    lone = tl.full((BM,), float("-inf"), tl.float32)
    if sink is not None:
        lone = tl.load(sink + h + tl.zeros_like(row)).to(tl.float32) * LOG2E
    factor, lse, highest, entropy, shift, inverse = finished(largest, total, energy, lone)
    mixed = mixed * factor[:, None] + bad
    wide_e = tl.arange(0, BE)
    to_row = b.to(tl.int64) * out.batch + h.to(tl.int64) * out.head + row.to(tl.int64) * out.row
    store = inside[:, None] & (wide_e < E)[None, :]
    at = out.ptr + to_row[:, None] + wide_e[None, :]
    tl.store(at, mixed.to(out.ptr.dtype.element_ty), mask=store)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    rows = tl.num_programs(1).to(tl.int64) * n.queries
    _write_rows(to, at, inside, rows, lse, highest, entropy, shift, inverse, STATISTICS)
