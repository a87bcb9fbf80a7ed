"""The kernels of the forward pass; forward.py says how they are run, README.md derives their sums.

Each program owns a tile of queries and loops over the keys they attend to: first the full tiles,
where no pair is masked, then the partial ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from regard.backends.triton.assembly import only_allowed
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import (
    DENSE,
    FAINT,
    LEAST,
    LN2,
    LOG2E,
    NO_BIAS,
    UNSEEN,
    finite_only,
    flagged,
    kept,
    load_rows,
    logits_of,
    product,
    row_max,
    spoilt,
)
from regard.backends.triton.rules import TILES, allowed, full_at, keys_for, part_at, sees_some


class Written(NamedTuple):
    """Where the statistics of rows are written, all [B, H, Q] contiguous, and [2, B, H, Q] for the
    backward pass, unless that is cuDNN's: the shift of the logits, and one over the sum of
    exponentials."""

    lse: Any
    largest: Any
    entropy: Any
    norm: Any
    first: Any
    """The first key's logit, or None where it is not asked for or the kernel cannot give it."""


class Parts(NamedTuple):
    """Sums of all splits of the keys: o [S, B, H, Q, E], and [3, S, B, H, Q] for m, l and e."""

    mixed: Any
    sums: Any


@triton.jit
def finished(largest, total, energy, sink):
    """The statistics of some rows from their sums: the factor of the output, log-sum-exp, largest
    logit, entropy, shift and sum. The sink is one more logit; without one it is minus infinity."""
    # Logits beyond 10⁹ are further from their rounded maximum than exp2 reaches. Such a row is NaN,
    # not a fully masked one.
    total = tl.where((total == 0) & (largest > LEAST), float("nan"), total)
    shift = tl.maximum(largest, sink)
    shrink = tl.exp2(largest - shift)
    # Exactly 0 where it should be: a sink times log₂ e is rounded, but not in a fused subtraction.
    below = tl.where(sink == shift, 0.0, sink - shift)
    whole = total * shrink + tl.exp2(below)
    nothing = whole == 0
    whole = tl.where(nothing, 1.0, whole)
    lse = tl.where(nothing, float("-inf"), (shift + tl.log2(whole)) * LN2)
    unseen = total == 0
    safe = tl.where(unseen, 1.0, total)
    log_keys = tl.log2(safe)
    entropy = tl.where(unseen, 0.0, log_keys - energy / safe)
    # Entropy of (keys or sink), then within the keys.
    log_share = tl.where(unseen, 0.0, log_keys + (largest - shift) - tl.log2(whole))
    share = tl.where(unseen, 0.0, tl.exp2(log_share))
    log_rest = below - tl.log2(whole)
    rest = tl.where(sink == float("-inf"), 0.0, tl.exp2(log_rest) * log_rest)
    entropy = share * (entropy - log_share) - rest
    seen = tl.where(unseen, float("-inf"), largest * LN2)
    # Comparisons, which find the largest logit, ignore NaN; the sum does not.
    seen = tl.where(total == total, seen, total)
    return shrink / whole, lse, seen, entropy * LN2, shift, 1.0 / whole


@triton.jit
def _write_rows(to, at, inside, rows, lse, seen, entropy, shift, inverse, STATISTICS: tl.constexpr):
    tl.store(to.lse + at, lse, mask=inside)
    if to.norm is not None:
        tl.store(to.norm + at, shift, mask=inside)
        tl.store(to.norm + rows + at, inverse, mask=inside)
    if STATISTICS:
        tl.store(to.largest + at, seen, mask=inside)
        tl.store(to.entropy + at, entropy, mask=inside)


@triton.jit
def _take_in(
    s, factor, v, mixed, largest, total, energy, drop, b, h, q, k,
    STATISTICS: tl.constexpr, GUARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax: add a tile of logits (s times a factor above 0) and values to the sums."""
    highest = tl.maximum(largest, row_max(s) * factor)
    x = s * factor - highest[:, None]
    p = tl.exp2(x)
    moved = largest - highest
    shrink = tl.exp2(moved)
    if STATISTICS:
        if GUARD:
            # Masked pairs are 0, not 0 · ∞.
            x = tl.maximum(x, FAINT)
        energy = shrink * (energy + total * moved) + tl.sum(p * x, 1)
    total = total * shrink + tl.sum(p, 1)
    if drop.on:
        p = tl.where(kept(drop, b, h, q, k), p * drop.grow, 0.0)
    mixed = mixed * shrink[:, None]
    mixed = product(p.to(v.dtype), v, mixed, PRECISION)
    return mixed, highest, total, energy


@triton.jit
def _spoiled(seen, v, PRECISION: tl.constexpr):
    """NaN or infinity for rows that attend to one among the values, else 0."""
    rows, wide = seen.to(tl.float16), v.to(tl.float32)
    nan = product(rows, (wide != wide).to(tl.float16), None, PRECISION)
    up = product(rows, (wide == float("inf")).to(tl.float16), None, PRECISION)
    down = product(rows, (wide == float("-inf")).to(tl.float16), None, PRECISION)
    bad = tl.where(up > 0, float("inf"), 0.0) - tl.where(down > 0, float("inf"), 0.0)
    return tl.where(nan > 0, float("nan"), bad)


@triton.jit
def _first_logits(
    qs, k, rule, bias, scoring, n, b, g, heads, places, limit, table,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The logits of the first key, minus infinity for rows in which it is masked."""
    wide = tl.arange(0, BD)
    there = k.ptr + b.to(tl.int64) * k.batch + g.to(tl.int64) * k.head + wide
    key = tl.load(there, mask=wide < tl.minimum(n.keys, 1) * D, other=0.0)
    s = tl.sum(qs.to(tl.float32) * key.to(tl.float32)[None, :], 1)[:, None]
    column = tl.arange(0, 1)[None, :]
    s, _ = logits_of(s, scoring, bias, b, heads, places, column, n)
    sees = allowed(rule, places, column, limit, table, BM, 1)
    return tl.sum(tl.where(sees, s * LN2, float("-inf")), 1)


@triton.jit
def _attend(
    tile, tiles, q, k, v, out, to, parts, flags, rule, bias, sink, drop, scoring, n,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STATISTICS: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, CAREFUL: tl.constexpr, DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries against its keys.

    CAREFUL keeps masked NaN and infinities among the values out of the products; otherwise a tile
    with NaN in its output is flagged. Split keys are checked at once: that pass is limited by
    memory bandwidth, not by arithmetic.
    """
    split, splits = 0, 1
    if SPLIT:
        split, splits = tl.program_id(2), tl.num_programs(2)
    row = tile * BM + tl.arange(0, BM)
    if PACKED:
        b = tl.program_id(1) // (n.heads // n.group)
        g = tl.program_id(1) % (n.heads // n.group)
        first_head = g * n.group
        inside = row < n.queries * n.group
        h = tl.minimum(first_head + row // n.queries, n.heads - 1)
        place = row % n.queries
        first, last = 0, n.queries - 1
    else:
        b = tl.program_id(1) // n.heads
        first_head = tl.program_id(1) % n.heads
        g = first_head // n.group
        inside = row < n.queries
        h = first_head + tl.zeros_like(row)
        place = row
        first, last = tile * BM, tl.minimum(tile * BM + BM, n.queries) - 1
    wide_d, wide_e = tl.arange(0, BD), tl.arange(0, BE)
    at_query = b.to(tl.int64) * q.batch + h.to(tl.int64) * q.head + place.to(tl.int64) * q.row
    keep = inside[:, None] & (wide_d < D)[None, :]
    qs = tl.load(q.ptr + at_query[:, None] + wide_d[None, :], mask=keep, other=0.0)

    mixed = tl.zeros((BM, BE), tl.float32)
    bad = tl.zeros((BM, BE), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    energy = tl.zeros((BM,), tl.float32)

    full, part, limit, path = keys_for(rule, n, b, first_head, tile, first, last, BN)
    largest = tl.full((BM,), LEAST, tl.float32)
    # Minus infinity in a bias hides a pair; it is no logit.
    if bias.kind == NO_BIAS:
        # Rows beyond the last query read no more of a mask than there is.
        some = (full > 0) | sees_some(rule, tl.minimum(place, n.queries - 1), limit, path[5])
        largest = tl.where(some, UNSEEN, largest)
    places, heads = place[:, None], h[:, None]
    at = (b * n.heads + h).to(tl.int64) * n.queries + place
    if to.first is not None:
        alone = _first_logits(
            qs, k, rule, bias, scoring, n, b, g, heads, places, limit, path[5], D, BD, BM
        )
        # All splits of a row compute and write the same number.
        tl.store(to.first + at, alone, mask=inside)
    # A scale above 0 keeps order, so it can be applied together with the shift.
    plain: tl.constexpr = scoring.positive and not scoring.capped and bias.kind == NO_BIAS
    factor = scoring.scale * LOG2E if plain else 1.0
    for i in tl.range(full * split // splits, full * (split + 1) // splits, num_stages=STAGES):
        key = full_at(rule, path, i, BN)
        if DESCRIBED:
            ks = k.load([b, g, key, 0]).reshape(BN, BD)
            vs = v.load([b, g, key, 0]).reshape(BN, BE)
        else:
            ks = load_rows(k, b, g, key, n.keys, D, BD, BN, True)
            vs = load_rows(v, b, g, key, n.keys, E, BE, BN, True)
        columns = (key + tl.arange(0, BN))[None, :]
        s = product(qs, ks.T, None, PRECISION)
        if not plain:
            s, _ = logits_of(s, scoring, bias, b, heads, places, columns, n)
        mixed, largest, total, energy = _take_in(
            s, factor, vs, mixed, largest, total, energy, drop, b, heads, places, columns,
            STATISTICS, bias.kind == DENSE, PRECISION,
        )  # fmt: skip
    for i in tl.range(part * split // splits, part * (split + 1) // splits, num_stages=STAGES):
        key, table = part_at(rule, path, i, BN)
        if DESCRIBED:
            ks = k.load([b, g, key, 0]).reshape(BN, BD)
            vs = v.load([b, g, key, 0]).reshape(BN, BE)
        else:
            ks = load_rows(k, b, g, key, n.keys, D, BD, BN, False)
            vs = load_rows(v, b, g, key, n.keys, E, BE, BN, False)
        columns = (key + tl.arange(0, BN))[None, :]
        s = product(qs, ks.T, None, PRECISION)
        if not plain:
            s, _ = logits_of(s, scoring, bias, b, heads, places, columns, n)
        s = only_allowed(s, rule, places, columns, limit, table, BM, BN)
        if rule.kind == TILES and bias.kind == NO_BIAS:
            met = tl.max(allowed(rule, places, columns, limit, table, BM, BN).to(tl.int32), 1)
            largest = tl.maximum(largest, tl.where(met > 0, UNSEEN, LEAST))
        if CAREFUL or SPLIT:
            seen = allowed(rule, places, columns, limit, table, BM, BN)
            bad += _spoiled(seen, vs, PRECISION)
            vs = finite_only(vs)
        mixed, largest, total, energy = _take_in(
            s, factor, vs, mixed, largest, total, energy, drop, b, heads, places, columns,
            STATISTICS, True, PRECISION,
        )  # fmt: skip

    rows = (tl.num_programs(1) // (n.heads // n.group if PACKED else n.heads)).to(tl.int64)
    rows = rows * n.heads * n.queries
    store = inside[:, None] & (wide_e < E)[None, :]
    if SPLIT:
        own = split * rows + at
        tl.store(parts.mixed + own[:, None] * E + wide_e[None, :], mixed + bad, mask=store)
        tl.store(parts.sums + own, largest, mask=inside)
        tl.store(parts.sums + splits * rows + own, total, mask=inside)
        if STATISTICS:
            tl.store(parts.sums + 2 * splits * rows + own, energy, mask=inside)
    else:
        lone = tl.full((BM,), float("-inf"), tl.float32)
        if sink is not None:
            lone = tl.load(sink + h).to(tl.float32) * LOG2E
        factor, lse, seen, entropy, shift, inverse = finished(largest, total, energy, lone)
        mixed = mixed * factor[:, None]
        if CAREFUL:
            mixed += bad
        elif flags is not None:
            found = tl.max(tl.max((mixed != mixed).to(tl.int32), 1), 0).to(tl.int8)
            tl.store(flags + tl.program_id(1) * tiles + tile, found)
        to_row = b.to(tl.int64) * out.batch + h.to(tl.int64) * out.head
        to_row += place.to(tl.int64) * out.row
        tl.store(
            out.ptr + to_row[:, None] + wide_e[None, :], mixed.to(out.ptr.dtype.element_ty),
            mask=store,
        )  # fmt: skip
        _write_rows(to, at, inside, rows, lse, seen, entropy, shift, inverse, STATISTICS)


@launched
@triton.jit
def forward_tiles(
    q, k, v, out, to, parts, flags, rule, bias, sink, drop, scoring, n,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STATISTICS: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, CAREFUL: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # Under a band later tiles have more keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    _attend(
        tile, tl.num_programs(0), q, k, v, out, to, parts, flags, rule, bias, sink, drop, scoring,
        n, D, E, BD, BE, BM, BN, STATISTICS, PACKED, SPLIT, CAREFUL, DESCRIBED, PRECISION, STAGES,
    )  # fmt: skip


@launched
@triton.jit
def mend(
    q, k, v, out, to, parts, flags, rule, bias, sink, drop, scoring, n, tiles,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STATISTICS: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, MANY: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Of MANY tiles, those where a masked NaN may have leaked, again and with checks: each cut into
    SHARES, since smaller tiles compile sooner and this hardly ever runs."""
    first = tl.program_id(0) * MANY
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    if spoilt(flags, out, n, b, h, first, tiles, E, BE, MANY):
        for share in range(first * SHARES, tl.minimum(first + MANY, tiles) * SHARES):
            if flagged(flags, tiles, share // SHARES):
                _attend(
                    share, tiles, q, k, v, out, to, parts, flags, rule, bias, sink, drop, scoring,
                    n, D, E, BD, BE, BM, BN, STATISTICS, PACKED, False, True, False, PRECISION, 1,
                )  # fmt: skip


@launched
@triton.jit
def merge(
    out, to, parts, sink, n, rows, splits,
    E: tl.constexpr, BE: tl.constexpr, MOST: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Merge the partial sums of one row, of at most MOST splits."""
    at = tl.program_id(0).to(tl.int64)
    h = (at // n.queries) % n.heads
    b = at // n.queries // n.heads
    place = at % n.queries
    split, wide_e = tl.arange(0, MOST), tl.arange(0, BE)
    mine = split * rows + at
    there = split < splits
    largest = tl.load(parts.sums + mine, mask=there, other=LEAST)
    total = tl.load(parts.sums + splits * rows + mine, mask=there, other=0.0)
    highest = tl.max(largest, 0)
    moved = largest - highest
    shrink = tl.exp2(moved)
    energy = total
    if STATISTICS:
        energy = tl.load(parts.sums + 2 * splits * rows + mine, mask=there, other=0.0)
        energy = tl.sum(shrink * (energy + total * moved), 0)
    else:
        energy = tl.sum(energy, 0)
    total = tl.sum(total * shrink, 0)
    keep = (wide_e < E)[None, :] & there[:, None]
    mixed = tl.load(parts.mixed + mine[:, None] * E + wide_e[None, :], mask=keep, other=0.0)
    # A fully masked split has weight 0, also beside NaN.
    mixed = tl.sum(tl.where(shrink[:, None] == 0, 0.0, mixed * shrink[:, None]), 0)
    lone = highest * 0 + float("-inf")
    if sink is not None:
        lone = tl.load(sink + h).to(tl.float32) * LOG2E
    factor, lse, seen, entropy, shift, inverse = finished(highest, total, energy, lone)
    to_row = out.ptr + b * out.batch + h * out.head + place * out.row
    tl.store(to_row + wide_e, (mixed * factor).to(out.ptr.dtype.element_ty), mask=wide_e < E)
    _write_rows(to, at, at >= 0, rows, lse, seen, entropy, shift, inverse, STATISTICS)
