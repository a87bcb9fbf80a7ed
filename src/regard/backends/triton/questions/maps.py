"""Pooled maps: the weights of a region of pairs, added into the cells of a map.

Nothing of size n×n is written. Under a band, tiles start where cells do: they hold several cells
where these are small and divide them, else each lies in one cell. Lists of tiles are visited as
they lie, and each tile adds to all cells it touches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Pool
from regard.backends.triton.arguments import added, constants_of, score, sheet, sizes, tiles_of
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import is_simple, rule_of
from regard.backends.triton.pairs import load_rows, logits_of, norms, product
from regard.backends.triton.rules import BAND, allowed, full_at, keys_for, limit_of, part_at
from regard.backends.triton.settings.tuning import Looking
from regard.inputs import AttentionInputs


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
    norm = norms(lse, base * n.queries + row, row < n.queries)[:, None]
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
        norm = norms(lse, base * n.queries + row, row <= last)[:, None]
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


@triton.jit
def _pool_cells(
    p, BM: tl.constexpr, BN: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """A tile of weights as cells of so many queries and keys."""
    p = p.reshape(BM // TALL, TALL, BN // BROAD, BROAD)
    return tl.max(tl.max(p, 3), 1) if LARGEST else tl.sum(tl.sum(p, 3), 1)


@triton.jit
def _write_cells(found, at, inside, ALONE: tl.constexpr, LARGEST: tl.constexpr):
    if ALONE:
        tl.store(at, found, mask=inside)
    elif LARGEST:
        tl.atomic_max(at, found, mask=inside, sem="relaxed")
    else:
        tl.atomic_add(at, found, mask=inside, sem="relaxed")


@launched
@triton.jit
def _pooled_in_tiles(
    q, k, lse, out, region, tall, share, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TALL: tl.constexpr,
    BROAD: tl.constexpr, ALONE: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The weights of a tile of queries, times `share`, where each tile holds many cells.

    For masks that are a band, and cells of BROAD keys and `tall` queries, a multiple of TALL. What
    is pooled in a tile are TALL queries; if they are a cell (`ALONE`), nobody else writes to it.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    g = h // n.group
    first = region.first_query + tile * BM
    last = tl.minimum(first + BM, region.first_query + region.queries) - 1
    row = first + tl.arange(0, BM)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    base = tl.program_id(1).to(tl.int64)
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    norm = norms(lse, base * n.queries + row, row < n.queries)[:, None]
    cell = (tile * BM + tl.arange(0, BM // TALL) * TALL) // tall
    out += (base * region.rows + cell[:, None]) * region.columns
    column = tl.arange(0, BN // BROAD)[None, :]
    row_here = (cell < region.rows)[:, None]

    # Tiles of keys, counted from the region's first.
    limit = limit_of(rule, n, b)
    start, stop = 0, limit - region.first_key
    full_start, full_stop = 0, limit - region.first_key
    if rule.kind == BAND:
        low, high = rule.low - region.first_key, rule.high + 1 - region.first_key
        start, full_start = tl.maximum(first + low, 0), tl.maximum(last + low, 0)
        stop, full_stop = tl.minimum(stop, last + high), tl.minimum(full_stop, first + high)
    start = start // BN
    stop = (tl.maximum(tl.minimum(stop, region.keys), 0) + BN - 1) // BN
    full_start = (full_start + BN - 1) // BN
    full_stop = tl.maximum(tl.minimum(full_stop, region.keys), 0) // BN
    if full_start >= full_stop:
        full_start, full_stop = start, start
    left = full_start - start
    for i in tl.range(full_start, full_stop, num_stages=STAGES):
        from_key = region.first_key + i * BN
        key = from_key + tl.arange(0, BN)
        ks = load_rows(k, b, g, from_key, n.keys, D, BD, BN, True)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, key[None, :], n)
        found = _pool_cells(tl.exp2(s - norm), BM, BN, TALL, BROAD, LARGEST) * share
        at = i * (BN // BROAD) + column
        _write_cells(found, out + at, row_here & (at < region.columns), ALONE, LARGEST)
    for j in tl.range(left + tl.maximum(stop - full_stop, 0), num_stages=STAGES):
        i = tl.where(j < left, start + j, full_stop + j - left)
        from_key = region.first_key + i * BN
        key = from_key + tl.arange(0, BN)
        ks = load_rows(k, b, g, from_key, n.keys, D, BD, BN, False)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, key[None, :], n)
        seen = allowed(rule, place, key[None, :], limit, 0, BM, BN)
        p = tl.where(seen, tl.exp2(tl.where(seen, s, float("-inf")) - norm), 0.0)
        found = _pool_cells(p, BM, BN, TALL, BROAD, LARGEST) * share
        at = i * (BN // BROAD) + column
        _write_cells(found, out + at, row_here & (at < region.columns), ALONE, LARGEST)


def is_one_launch(
    x: AttentionInputs,
    how: Looking,
    cells: tuple[int, int],
    queries: tuple[int, int],
    keys: tuple[int, int],
) -> bool:
    """Whether a map is what one kernel writes to memory that starts at 0."""
    places = queries[1] - queries[0], keys[1] - keys[0]
    return is_simple(x.mask) and _Fine.of(how, *places, cells) is not None


def pooled_map(
    x: AttentionInputs,
    how: Looking,
    lse: Float[Tensor, "b h q"],
    cells: tuple[int, int],
    queries: tuple[int, int],
    keys: tuple[int, int],
    pool: Pool,
) -> Float[Tensor, "b h rows columns"]:
    """The weights of a region, pooled into cells; with what settings is said."""
    B, H, _, _ = x.shape
    out = lse.new_zeros(B, H, *cells)
    many_queries, many_keys = queries[1] - queries[0], keys[1] - keys[0]
    region = Region(queries[0], many_queries, cells[0], keys[0], many_keys, cells[1])
    rest = (sheet(x.q), sheet(x.k), lse.contiguous(), out, region)
    call = (added(x), score(x), sizes(x))
    fine = _Fine.of(how, many_queries, many_keys, cells) if is_simple(x.mask) else None
    if fine is not None:
        share = 1 / (fine.tall * fine.broad) if pool == "mean" else 1.0
        rule = rule_of(x.mask, x.shape, (fine.how.rows, fine.how.keys), x.q.device, by_keys=False)
        _pooled_in_tiles[(tiles_of(many_queries, fine.how.rows), B * H)](
            *rest, fine.tall, share, rule, *call,
            **constants_of(x, fine.how.rows, fine.how.keys, how.precision), TALL=fine.together,
            BROAD=fine.broad, ALONE=fine.together == fine.tall, LARGEST=pool == "max",
            STAGES=fine.how.stages, num_warps=fine.how.warps, num_stages=fine.how.stages,
            maxnreg=fine.registers,
        )  # fmt: skip
        return out
    above = _edges(queries, cells[0], lse)
    beside = _edges(keys, cells[1], lse)
    largest: dict[str, Any] = {"LARGEST": pool == "max", "STAGES": how.stages}
    launch = {"num_warps": how.warps, "num_stages": how.stages}
    if is_simple(x.mask):
        rows, tall = _tiles_of_cells(many_queries, cells[0], how.rows)
        columns, broad = _tiles_of_cells(many_keys, cells[1], how.keys)
        rule = rule_of(x.mask, x.shape, (rows, columns), x.q.device, by_keys=False)
        _pooled_by_cell[(cells[0] * tall, B * H)](
            *rest[:-1], above, beside, region, tall, broad, rule, *call,
            **constants_of(x, rows, columns, how.precision), **largest, **launch,
        )  # fmt: skip
    else:
        rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
        tiles = tiles_of(queries[1], how.rows) - queries[0] // how.rows
        _pooled[(tiles, B * H)](
            *rest, rule, *call, **constants_of(x, how.rows, how.keys, how.precision), **largest,
            WHOLE=many_keys == x.shape.K, **launch,
        )  # fmt: skip
    if pool == "mean":
        out /= above.diff()[:, None]
        out /= beside.diff()
    return out


class _Fine(NamedTuple):
    """Cells that divide tiles: their queries and keys, how many of the queries are pooled within a
    tile, and how it is computed."""

    tall: int
    broad: int
    together: int
    how: Looking
    registers: int | None

    @staticmethod
    def of(how: Looking, many_queries: int, many_keys: int, cells: tuple[int, int]) -> _Fine | None:
        registers = None
        if how.rows == 128:
            # Broader tiles read queries less often; two programs share a multiprocessor, so that
            # products of one run under the powers of the other.
            how = replace(how, keys=128, warps=8, stages=2)
            # The finest cells are bound by memory, and hold a whole tile of them.
            registers = 128 if many_keys >= 4 * cells[1] else None
        tall, broad = many_queries // cells[0], many_keys // cells[1]
        if many_queries % cells[0] or many_keys % cells[1] or how.keys % broad:
            return None
        # A warp holds 16 queries of a tile: what lies in several would have them wait for another.
        together = math.gcd(tall, 16)
        if tall > together < 16:
            return None
        return _Fine(tall, broad, together, how, registers)


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
