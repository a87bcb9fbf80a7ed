"""Questions about the weights, answered by walking over q and k once more with lse in hand.

What each key received owns a tile of keys and sums over queries; the other questions own a tile of
queries. Nothing of size n×n is written: a pooled map adds each tile into the cells it touches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Pool, Top
from regard.backends.tiled.second_pass import TiledPass
from regard.backends.triton.arguments import added, on_card, score, sheet, sizes, tiles_of, wide
from regard.backends.triton.hopper_received import received_on_hopper
from regard.backends.triton.launching import launched
from regard.backends.triton.layout import is_simple, rule_of
from regard.backends.triton.pairs import (
    BAND,
    LN2,
    LOG2E,
    allowed,
    full_at,
    keys_for,
    limit_of,
    load_rows,
    logits_of,
    part_at,
    product,
    rows_for,
)
from regard.backends.triton.tuning import Looking, fits_hopper, looking_settings
from regard.inputs import AttentionInputs


@triton.jit
def _norms(lse, at, inside):
    """lse in units of log 2; rows that see nothing get +∞, which makes all their weights 0."""
    norm = tl.load(lse + at, mask=inside, other=float("-inf"))
    return tl.where(norm == float("-inf"), float("inf"), norm * LOG2E)


@launched
@triton.jit
def _received(
    q, k, lse, out, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a tile of keys got from all queries of one head. Keys are rows."""
    tile = tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tile * BN
    last = tl.minimum(first + BN, n.keys) - 1
    key = first + tl.arange(0, BN)
    ks = load_rows(k, b, h // n.group, first, n.keys, D, BD, BN, False)
    total = tl.zeros((BN,), tl.float32)
    full, part, limit, path = rows_for(rule, n, b, h, tile, first, last, BM)
    base = tl.program_id(1).to(tl.int64) * n.queries
    for i in tl.range(full, num_stages=STAGES):
        start = full_at(rule, path, i, BM)
        row = start + tl.arange(0, BM)
        qs = load_rows(q, b, h, start, n.queries, D, BD, BM, True)
        norm = _norms(lse, base + row, row < n.queries)
        heads = (h + tl.zeros_like(row))[None, :]
        s = product(ks, qs.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, row[None, :], key[:, None], n)
        total += tl.sum(tl.exp2(s - norm[None, :]), 1)
    for i in tl.range(part, num_stages=STAGES):
        start, table = part_at(rule, path, i, BM)
        row = start + tl.arange(0, BM)
        qs = load_rows(q, b, h, start, n.queries, D, BD, BM, False)
        norm = _norms(lse, base + row, row < n.queries)
        heads = (h + tl.zeros_like(row))[None, :]
        s = product(ks, qs.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, row[None, :], key[:, None], n)
        seen = allowed(rule, row[None, :], key[:, None], limit, table, BM, BN)
        seen &= (row < n.queries)[None, :]
        p = tl.exp2(tl.where(seen, s, float("-inf")) - norm[None, :])
        total += tl.sum(tl.where(seen, p, 0.0), 1)
    at = tl.program_id(1).to(tl.int64) * n.keys + key
    tl.store(out + at, total, mask=key < n.keys)


class Region(NamedTuple):
    """Part of the pairs, and the cells it is pooled into: place i of m is in cell i · cells / m."""

    first_query: Any
    queries: Any
    rows: Any
    first_key: Any
    keys: Any
    columns: Any


@triton.jit
def _pool_tile(
    p, out, region, place, key, inside, BM: tl.constexpr, BN: tl.constexpr, LARGEST: tl.constexpr
):
    """Add a tile of weights into its cells, one column of cells at a time."""
    row = (place - region.first_query).to(tl.int64) * region.rows // region.queries
    column = (key - region.first_key).to(tl.int64) * region.columns // region.keys
    row_here = (place >= region.first_query) & (place < region.first_query + region.queries)
    key_here = (key >= region.first_key) & (key < region.first_key + region.keys)
    here = row_here[:, None] & key_here[None, :]
    p = tl.where(here & inside, p, 0.0)
    left = tl.min(tl.where(key_here, column, region.columns), 0)
    right = tl.max(tl.where(key_here, column, -1), 0)
    top = tl.min(tl.where(row_here, row, region.rows), 0)
    bottom = tl.max(tl.where(row_here, row, -1), 0)
    for c in range(left, right + 1):
        mine = tl.where((column == c)[None, :], p, 0.0)
        found = tl.max(mine, 1) if LARGEST else tl.sum(mine, 1)
        if bottom - top < 4:
            # Few rows of cells: one number for each, so that programs do not queue for them.
            for r in range(top, bottom + 1):
                at = out + r * region.columns + c
                if LARGEST:
                    tl.atomic_max(at, tl.max(tl.where(row == r, found, 0.0), 0))
                else:
                    tl.atomic_add(at, tl.sum(tl.where(row == r, found, 0.0), 0))
        else:
            at = out + row * region.columns + c
            if LARGEST:
                tl.atomic_max(at, found, mask=row_here)
            else:
                tl.atomic_add(at, found, mask=row_here)


@launched
@triton.jit
def _pooled(
    q, k, lse, out, region, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LARGEST: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The weights of a tile of queries, added into the cells of the map."""
    tile = region.first_query // BM + tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    g = h // n.group
    first = tile * BM
    last = tl.minimum(first + BM, n.queries) - 1
    row = first + tl.arange(0, BM)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    base = tl.program_id(1).to(tl.int64)
    norm = _norms(lse, base * n.queries + row, row < n.queries)[:, None]
    out += base * region.rows * region.columns
    full, part, limit, path = keys_for(rule, n, b, h, tile, first, last, BN)
    for i in tl.range(full, num_stages=STAGES):
        start = full_at(rule, path, i, BN)
        key = start + tl.arange(0, BN)
        # Where all keys are looked at there is no question to ask, and loads can run ahead.
        if WHOLE or ((start + BN > region.first_key) & (start < region.first_key + region.keys)):
            ks = load_rows(k, b, g, start, n.keys, D, BD, BN, True)
            s = product(qs, ks.T, None, PRECISION)
            s, _ = logits_of(s, scoring, bias, b, heads, place, key[None, :], n)
            _pool_tile(tl.exp2(s - norm), out, region, row, key, place >= 0, BM, BN, LARGEST)
    for i in tl.range(part, num_stages=STAGES):
        start, table = part_at(rule, path, i, BN)
        key = start + tl.arange(0, BN)
        if (start + BN > region.first_key) & (start < region.first_key + region.keys):
            ks = load_rows(k, b, g, start, n.keys, D, BD, BN, False)
            s = product(qs, ks.T, None, PRECISION)
            s, _ = logits_of(s, scoring, bias, b, heads, place, key[None, :], n)
            seen = allowed(rule, place, key[None, :], limit, table, BM, BN)
            seen &= place < n.queries
            p = tl.exp2(tl.where(seen, s, float("-inf")) - norm)
            _pool_tile(p, out, region, row, key, seen, BM, BN, LARGEST)


@launched
@triton.jit
def _pooled_by_cell(
    q, k, lse, out, above, beside, region, tall, broad, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LARGEST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The weights of a tile of queries, added into the map one cell after the other.

    For masks that are a band. Tiles start where cells do, `tall` of them below each other and
    `broad` beside each other, so that each lies in one cell: `above` and `beside` tell where the
    rows and columns of cells start.
    """
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    r = part // tall
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tl.load(above + r) + part % tall * BM
    last = tl.minimum(first + BM, tl.load(above + r + 1)) - 1
    row = first + tl.arange(0, BM)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    base = tl.program_id(1).to(tl.int64)
    limit = limit_of(rule, n, b)
    start, stop = 0, limit
    if rule.kind == BAND:
        start, stop = first + rule.low, tl.minimum(limit, last + rule.high + 1)
    start = tl.maximum(start - region.first_key, 0)
    stop = tl.minimum(stop - region.first_key, region.keys)
    if (first <= last) & (start < stop):
        qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
        norm = _norms(lse, base * n.queries + row, row <= last)[:, None]
        left = (start.to(tl.int64) * region.columns // region.keys).to(tl.int32)
        right = ((stop - 1).to(tl.int64) * region.columns // region.keys).to(tl.int32) + 1
        found = tl.zeros((BM,), tl.float32)
        out += (base * region.rows + r) * region.columns
        for i in tl.range(left * broad, right * broad, num_stages=STAGES):
            c = i // broad
            from_key = tl.load(beside + c) + i % broad * BN
            to_key = tl.minimum(tl.load(beside + c + 1), limit)
            key = from_key + tl.arange(0, BN)
            ks = load_rows(k, b, h // n.group, from_key, to_key, D, BD, BN, False)
            s = product(qs, ks.T, None, PRECISION)
            s, _ = logits_of(s, scoring, bias, b, heads, place, key[None, :], n)
            p = tl.exp2(s - norm)
            whole = (from_key + BN <= to_key) & (first + BM - 1 == last)
            if rule.kind == BAND:
                whole &= (from_key - last >= rule.low) & (from_key + BN - 1 - first <= rule.high)
            if not whole:
                seen = allowed(rule, place, key[None, :], to_key, 0, BM, BN) & (place <= last)
                p = tl.where(seen, p, 0.0)
            if LARGEST:
                found = tl.maximum(found, tl.max(p, 1))
            else:
                found += tl.sum(p, 1)
            if i % broad == broad - 1:
                if LARGEST:
                    tl.atomic_max(out + c, tl.max(found, 0), sem="relaxed")
                else:
                    tl.atomic_add(out + c, tl.sum(found, 0), sem="relaxed")
                found = tl.zeros((BM,), tl.float32)


@launched
@triton.jit
def _top_and_mean(
    q, k, lse, values, indices, mean, rule, bias, scoring, n, many,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    TOP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The strongest keys of each query, or the mean of its logits."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tile * BM
    last = tl.minimum(first + BM, n.queries) - 1
    row = first + tl.arange(0, BM)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    full, part, limit, path = keys_for(rule, n, b, h, tile, first, last, BN)
    slot = tl.arange(0, BT)[None, :]
    # Slots beyond the number asked for are never the weakest, so they are never filled.
    best = tl.where(slot < many, float("-inf"), float("inf")) + tl.zeros((BM, BT), tl.float32)
    where = tl.full((BM, BT), -1, tl.int32)
    total = tl.zeros((BM,), tl.float32)
    count = tl.zeros((BM,), tl.float32)
    for i in range(full + part):
        table = 0
        if i < full:
            start = full_at(rule, path, i, BN)
        else:
            start, table = part_at(rule, path, i - full, BN)
        key = start + tl.arange(0, BN)
        ks = load_rows(k, b, h // n.group, start, n.keys, D, BD, BN, False)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, key[None, :], n)
        seen = (key < n.keys)[None, :] & (place < n.queries)
        if i >= full:
            seen &= allowed(rule, place, key[None, :], limit, table, BM, BN)
        s = tl.where(seen, s, float("-inf"))
        if TOP:
            strongest = tl.max(s, 1)
            weakest = tl.min(best, 1)
            while tl.max((strongest > weakest).to(tl.int32), 0) > 0:
                at = tl.argmax(s, 1)
                free = tl.argmin(best, 1)
                takes = (strongest > weakest)[:, None]
                here = takes & (slot == free[:, None])
                best = tl.where(here, strongest[:, None], best)
                where = tl.where(here, (start + at)[:, None], where)
                taken = tl.arange(0, BN)[None, :] == at[:, None]
                s = tl.where(takes & taken, float("-inf"), s)
                strongest = tl.max(s, 1)
                weakest = tl.min(best, 1)
        else:
            # A bias of minus infinity hides a pair as well.
            hidden = s == float("-inf")
            total += tl.sum(tl.where(hidden, 0.0, s), 1)
            count += tl.sum(tl.where(hidden, 0.0, 1.0), 1)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    if TOP:
        norm = _norms(lse, at, row < n.queries)[:, None]
        to = at[:, None] * many + slot
        store = (place < n.queries) & (slot < many)
        tl.store(values + to, tl.where(where < 0, -1.0, tl.exp2(best - norm)), mask=store)
        tl.store(indices + to, where.to(tl.int64), mask=store)
    else:
        found = tl.where(count > 0, total * LN2 / tl.maximum(count, 1.0), float("-inf"))
        tl.store(mean + at, found, mask=row < n.queries)


class TritonPass(TiledPass):
    """The tiled answers, with kernels for those that look at every pair.

    `weights` and `mass` look only at what was asked for: plain products serve them well.
    """

    @torch.no_grad()
    def received(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"]
    ) -> Float[Tensor, "b h k"]:
        if not _takes(inputs):
            return super().received(inputs, lse)
        with on_card(lse):
            return _received_by_keys(inputs, lse)

    @torch.no_grad()
    def pooled(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Float[Tensor, "b h rows columns"]:
        # Tiles add to the cells they share in no fixed order.
        unordered = pool != "max" and torch.are_deterministic_algorithms_enabled()
        if unordered or not _takes(inputs):
            return super().pooled(inputs, lse, cells, queries, keys, pool)
        with on_card(lse):
            return _pooled_map(inputs, lse, cells, queries, keys, pool)

    @torch.no_grad()
    def top(self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], n: int) -> Top:
        many = min(n, inputs.shape.K)
        if not _takes(inputs) or not 0 < many <= 64:
            return super().top(inputs, lse, n)
        x = inputs
        values = lse.new_empty(*lse.shape, many)
        indices = torch.empty_like(values, dtype=torch.int64)
        with on_card(lse):
            _walk_rows(x, lse.contiguous(), values, indices, None, many)
        values, order = values.sort(-1, descending=True)
        return Top(values.clamp_min_(0), indices.gather(-1, order))

    @torch.no_grad()
    def mean_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        if not _takes(inputs):
            return super().mean_logit(inputs)
        B, H, Q, _ = inputs.shape
        mean = torch.empty(B, H, Q, dtype=torch.float32, device=inputs.q.device)
        with on_card(mean):
            _walk_rows(inputs, None, None, None, mean, 0)
        return mean


def _takes(x: AttentionInputs) -> bool:
    from regard.backends.triton import why_not

    return not why_not(x)


def _constants(x: AttentionInputs, how: Looking) -> dict[str, Any]:
    D = x.q.shape[-1]
    return {"D": D, "BD": wide(D), "BM": how.rows, "BN": how.keys, "PRECISION": how.precision}


def _received_by_keys(x: AttentionInputs, lse: Float[Tensor, "b h q"]) -> Float[Tensor, "b h k"]:
    how = looking_settings(x)
    if how.hopper and fits_hopper(x):
        return received_on_hopper(x, lse.contiguous())
    B, H, _, K = x.shape
    out = lse.new_empty(B, H, K)
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=True)
    _received[(tiles_of(K, how.keys), B * H)](
        sheet(x.q), sheet(x.k), lse.contiguous(), out, rule, added(x), score(x), sizes(x),
        **_constants(x, how), STAGES=how.stages, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return out


def _pooled_map(
    x: AttentionInputs,
    lse: Float[Tensor, "b h q"],
    cells: tuple[int, int],
    queries: tuple[int, int],
    keys: tuple[int, int],
    pool: Pool,
) -> Float[Tensor, "b h rows columns"]:
    how = looking_settings(x)
    B, H, _, _ = x.shape
    out = lse.new_zeros(B, H, *cells)
    many_queries, many_keys = queries[1] - queries[0], keys[1] - keys[0]
    region = Region(queries[0], many_queries, cells[0], keys[0], many_keys, cells[1])
    above = _edges(queries, cells[0], lse)
    beside = _edges(keys, cells[1], lse)
    rest = (sheet(x.q), sheet(x.k), lse.contiguous(), out, region)
    call = (added(x), score(x), sizes(x))
    largest: dict[str, Any] = {"LARGEST": pool == "max", "STAGES": how.stages}
    launch = {"num_warps": how.warps, "num_stages": how.stages}
    if is_simple(x.mask):
        rows, tall = _tiles_of_cells(many_queries, cells[0], how.rows)
        columns, broad = _tiles_of_cells(many_keys, cells[1], how.keys)
        rule = rule_of(x.mask, x.shape, (rows, columns), x.q.device, by_keys=False)
        _pooled_by_cell[(cells[0] * tall, B * H)](
            *rest[:-1], above, beside, region, tall, broad, rule, *call,
            **_constants(x, how) | {"BM": rows, "BN": columns}, **largest, **launch,
        )  # fmt: skip
    else:
        rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
        tiles = tiles_of(queries[1], how.rows) - queries[0] // how.rows
        _pooled[(tiles, B * H)](
            *rest, rule, *call, **_constants(x, how), **largest,
            WHOLE=many_keys == x.shape.K, **launch,
        )  # fmt: skip
    if pool == "mean":
        out /= above.diff()[:, None]
        out /= beside.diff()
    return out


def _walk_rows(
    x: AttentionInputs,
    lse: Tensor | None,
    values: Tensor | None,
    indices: Tensor | None,
    mean: Tensor | None,
    many: int,
) -> None:
    how = looking_settings(x)
    B, H, Q, _ = x.shape
    rows = min(how.rows, 32) if many else how.rows
    rule = rule_of(x.mask, x.shape, (rows, how.keys), x.q.device, by_keys=False)
    _top_and_mean[(tiles_of(Q, rows), B * H)](
        sheet(x.q), sheet(x.k), lse, values, indices, mean, rule, added(x), score(x), sizes(x),
        many, **_constants(x, how) | {"BM": rows}, BT=max(2, triton.next_power_of_2(many)),
        TOP=many > 0, num_warps=4, num_stages=how.stages,
    )  # fmt: skip


def _tiles_of_cells(places: int, cells: int, widest: int) -> tuple[int, int]:
    """The side of tiles that start where cells do, and how many a cell takes: little is computed
    in vain, and tiles are large."""
    longest = -(-places // cells)
    sides = [side for side in (128, 64, 32, 16) if side <= widest]
    # A tile half as large takes more than half the time.
    side = min(sides, key=lambda side: tiles_of(longest, side) * side**0.7)
    return side, tiles_of(longest, side)


def _edges(span: tuple[int, int], cells: int, like: Tensor) -> Tensor:
    """The first place of each cell, and the end of the last."""
    first, places = span[0], span[1] - span[0]
    cell = torch.arange(cells + 1, device=like.device)
    return (first - (-cell * places // cells)).to(torch.int32)
