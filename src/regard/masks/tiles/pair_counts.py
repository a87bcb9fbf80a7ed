"""Cutting a mask into tiles, and counting its pairs, with work that follows the mask's outline.

Counting subdivides: the whole rectangle is judged, and only what is neither all allowed nor all
masked is cut in four. The work is that of the boundary, not of the area, so a causal mask over a
million tokens takes milliseconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Int, Int8
from torch import Tensor

from regard.masks.tiles.pair_rule import PairRule
from regard.masks.tiles.states import EMPTY, FULL, PARTIAL, Tiles
from regard.values import Shape

_AT_ONCE = 4096
"""Tiles that are quartered together."""
_SIDE = 128
"""Queries and keys of a tile whose keys are counted."""


class Survey(NamedTuple):
    """What a mask asks for: allowed pairs, and pairs in tiles that must be visited.

    Summed over the batch entries and heads that the mask distinguishes."""

    pairs: int
    visited: int


def grid(
    bound: PairRule, shape: Shape, q_size: int, k_size: int, device: torch.device, *, exact: bool
) -> Int8[Tensor, "b h tq tk"]:
    """The state of every tile. `exact` looks inside tiles that combination left undecided."""
    q0 = torch.arange(0, shape.Q, q_size, device=device)
    k0 = torch.arange(0, shape.K, k_size, device=device)
    q1, k1 = (q0 + q_size).clamp_max(shape.Q), (k0 + k_size).clamp_max(shape.K)
    rows, columns = len(q0), len(k0)
    if not rows or not columns:
        return torch.zeros(bound.batch, bound.heads, rows, columns, dtype=torch.int8, device=device)
    tiles = Tiles(
        q0.repeat_interleave(columns),
        q1.repeat_interleave(columns),
        k0.repeat(rows),
        k1.repeat(rows),
    )
    state = bound.judge(tiles).expand(bound.batch, bound.heads, -1)
    if exact:
        state = _settled(bound, tiles, state)
    return state.reshape(bound.batch, bound.heads, rows, columns)


def _settled(bound: PairRule, tiles: Tiles, state: Tensor) -> Tensor:
    """Partial tiles that are really full or empty, found by counting."""
    doubtful = (state == PARTIAL).flatten(0, 1).any(0).nonzero().squeeze(-1)
    if not len(doubtful):
        return state
    some = Tiles(*(edge[doubtful] for edge in tiles))
    inside = _pairs_inside(bound, some)
    area = (some.q1 - some.q0) * (some.k1 - some.k0)
    state = state.clone()
    found = torch.full_like(inside, PARTIAL, dtype=torch.int8)
    found[inside == area] = FULL
    found[inside == 0] = EMPTY
    state[..., doubtful] = found
    return state


def _pairs_inside(bound: PairRule, tiles: Tiles) -> Int[Tensor, "b h t"]:
    """Allowed pairs in each tile, for each batch entry and head.

    Partial tiles are quartered, which soon leaves few of them where a mask has an outline. Where
    most stay partial it has none, and their pairs are counted one by one.
    """
    if not len(tiles.q0):
        return torch.zeros(bound.batch, bound.heads, 0, dtype=torch.int64, device=tiles.q0.device)
    parts = zip(*(edge.split(_AT_ONCE) for edge in tiles), strict=True)
    return torch.cat([_pairs_inside_some(bound, Tiles(*part)) for part in parts], -1)


def _pairs_inside_some(bound: PairRule, tiles: Tiles) -> Int[Tensor, "b h t"]:
    total = torch.zeros(
        bound.batch, bound.heads, len(tiles.q0), dtype=torch.int64, device=tiles.q0.device
    )
    owner = torch.arange(len(tiles.q0), device=tiles.q0.device)
    first = True
    while len(owner):
        state = bound.judge(tiles).expand(bound.batch, bound.heads, -1)
        open_ = (state == PARTIAL).flatten(0, 1).any(0)
        done = ~open_
        area = (tiles.q1 - tiles.q0) * (tiles.k1 - tiles.k0)
        assert not (open_ & (area == 1)).any(), f"{bound!r} leaves a single pair undecided"
        total.index_add_(-1, owner[done], (state[..., done] == FULL) * area[done])
        left = Tiles(*(edge[open_] for edge in tiles))
        if not first and 4 * len(left.q0) > 3 * len(owner):
            total.index_add_(-1, owner[open_], pairs_one_by_one(bound, left))
            return total
        tiles, owner = _quartered(left, owner[open_])
        first = False
    return total


def pairs_one_by_one(bound: PairRule, tiles: Tiles) -> Int[Tensor, "b h t"]:
    """Allowed pairs in each tile, by asking about each pair, some tiles at a time."""
    B, H, device = bound.batch, bound.heads, tiles.q0.device
    sides = (int((tiles.q1 - tiles.q0).max()), int((tiles.k1 - tiles.k0).max()))
    b, h = (torch.arange(n, device=device) for n in (B, H))
    down, across = (torch.arange(side, device=device) for side in sides)
    found = []
    step = max(1, (1 << 20) // (B * H * sides[0] * sides[1]))
    for q0, q1, k0, k1 in zip(*(edge.split(step) for edge in tiles), strict=True):
        q, k = q0[:, None] + down, k0[:, None] + across
        allowed = bound.allows(
            b.view(-1, 1, 1, 1, 1),
            h.view(-1, 1, 1, 1),
            torch.minimum(q, q1[:, None] - 1)[..., None],
            torch.minimum(k, k1[:, None] - 1)[:, None],
        )
        inside = (q < q1[:, None])[..., None] & (k < k1[:, None])[:, None]
        found.append((allowed & inside).expand(B, H, *inside.shape).sum((-2, -1)))
    return torch.cat(found, -1)


def _quartered(tiles: Tiles, owner: Tensor) -> tuple[Tiles, Tensor]:
    q, k = (tiles.q0 + tiles.q1 + 1) // 2, (tiles.k0 + tiles.k1 + 1) // 2
    q0, q1 = torch.cat([tiles.q0, tiles.q0, q, q]), torch.cat([q, q, tiles.q1, tiles.q1])
    k0, k1 = torch.cat([tiles.k0, k, tiles.k0, k]), torch.cat([k, tiles.k1, k, tiles.k1])
    real = (q0 < q1) & (k0 < k1)
    return Tiles(q0[real], q1[real], k0[real], k1[real]), owner.repeat(4)[real]


def survey(bound: PairRule, shape: Shape, q_size: int, k_size: int, device: torch.device) -> Survey:
    """Count allowed pairs, and the pairs of all tiles that hold any."""
    if not shape.Q or not shape.K:
        return Survey(0, 0)
    # Squares of 2^n tiles, so that quartering ends exactly on tile borders.
    level = math.ceil(math.log2(max(1, -(-shape.Q // q_size), -(-shape.K // k_size))))
    rows = columns = torch.zeros(1, dtype=torch.int64, device=device)
    visited = torch.zeros((), dtype=torch.int64, device=device)
    for depth in range(level, -1, -1):
        q_side, k_side = q_size << depth, k_size << depth
        tiles = Tiles(
            rows * q_side,
            (rows * q_side + q_side).clamp_max(shape.Q),
            columns * k_side,
            (columns * k_side + k_side).clamp_max(shape.K),
        )
        state = bound.judge(tiles).expand(bound.batch, bound.heads, -1)
        open_ = (state == PARTIAL).flatten(0, 1).any(0)
        area = (tiles.q1 - tiles.q0) * (tiles.k1 - tiles.k0)
        visited += ((state[..., ~open_] == FULL) * area[~open_]).sum()
        rows, columns = rows[open_], columns[open_]
        if depth:
            rows = torch.cat([2 * rows, 2 * rows, 2 * rows + 1, 2 * rows + 1])
            columns = torch.cat([2 * columns, 2 * columns + 1, 2 * columns, 2 * columns + 1])
            side_q, side_k = q_size << (depth - 1), k_size << (depth - 1)
            real = (rows * side_q < shape.Q) & (columns * side_k < shape.K)
            rows, columns = rows[real], columns[real]
    pairs = int(visited)
    left = Tiles(*(edge[open_] for edge in tiles))
    if bound.relative:
        # Distances alone decide, so pairs come from a sum over distances instead.
        return Survey(_count_by_distance(bound, shape, device), pairs + int(area[open_].sum()))
    inside = _pairs_inside(bound, left)
    return Survey(pairs + int(inside.sum()), pairs + int(((inside > 0) * area[open_]).sum()))


def count(bound: PairRule, shape: Shape, device: torch.device) -> int:
    """Allowed pairs over the batch entries and heads that the mask distinguishes."""
    if not shape.Q or not shape.K:
        return 0
    if bound.relative:
        return _count_by_distance(bound, shape, device)
    return survey(bound, shape, 128, 128, device).pairs


def _count_by_distance(bound: PairRule, shape: Shape, device: torch.device) -> int:
    """Each distance k - q occurs a known number of times."""
    band = bound.band()
    if band is not None:
        start, stop = band_edges(band, shape, device)
        return int((stop - start).sum())
    distance = torch.arange(-shape.Q + 1, shape.K, device=device)
    q = (-distance).clamp_min(0)
    zero = torch.zeros_like(q)
    times = torch.minimum(shape.Q - q, shape.K - q - distance)
    return int((bound.allows(zero, zero, q, q + distance) * times).sum())


def band_edges(
    band: tuple[float, float], shape: Shape, device: torch.device
) -> tuple[Int[Tensor, "q"], Int[Tensor, "q"]]:
    """The keys [start, stop) of a band that each query may see; start = stop if there are none."""
    q = torch.arange(shape.Q, device=device)
    low, high = max(band[0], -shape.Q), min(band[1], shape.K)
    start = (q + max(min(low, shape.K), -shape.Q)).clamp(0, shape.K)
    stop = (q + max(high, -shape.Q) + 1).clamp(0, shape.K)
    return start, torch.maximum(start, stop)


def seen_keys(bound: PairRule, shape: Shape, device: torch.device) -> Int[Tensor, "b h q"]:
    """How many keys each query may see, for the batch entries and heads that the mask
    distinguishes.

    Bands take two edges a query. Of other masks whole tiles are added up, and only those that are
    partly allowed are looked into, some at a time.
    """
    band = bound.band()
    if band is not None:
        start, stop = band_edges(band, shape, device)
        return (stop - start)[None, None]
    B, H, Q, K = bound.batch, bound.heads, shape.Q, shape.K
    state = grid(bound, shape, _SIDE, _SIDE, device, exact=False)
    first = torch.arange(0, K, _SIDE, device=device)
    width = (first + _SIDE).clamp_max(K) - first
    full = ((state == FULL) * width).sum(-1)
    total = full[..., None].repeat(1, 1, 1, _SIDE)
    inside = torch.arange(_SIDE, device=device)
    b, h = (torch.arange(n, device=device) for n in (B, H))
    open_ = (state == PARTIAL).flatten(0, 1).any(0).nonzero()
    for row, column in (part.unbind(1) for part in open_.split(max(1, (1 << 8) // (B * H)))):
        q, k = row[:, None] * _SIDE + inside, column[:, None] * _SIDE + inside
        allowed = bound.allows(
            b.view(-1, 1, 1, 1, 1),
            h.view(-1, 1, 1, 1),
            q.clamp_max(Q - 1)[..., None],
            k.clamp_max(K - 1)[:, None],
        )
        count = (allowed & (k < K)[:, None]).expand(B, H, len(row), _SIDE, _SIDE).sum(-1)
        undecided = state[:, :, row, column] == PARTIAL
        total.index_add_(2, row, count * undecided[..., None])
    return total.flatten(2)[..., :Q]
