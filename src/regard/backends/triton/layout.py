"""From a mask to the tiles that kernels loop over.

Bands (causal, window, and both) and key limits (padding) are numbers that a kernel computes with.
Where each query sees one run of keys (documents, prefixes), kernels read where it begins and ends.
Any other mask becomes lists of tiles: full ones, and partial ones with one bit per pair. Empty
tiles are in no list, so they are never loaded. Partial tiles at the same distance from the
diagonal share their bits when only distance matters.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends.triton.captures import capturing, hold
from regard.backends.triton.rules import ALL, BAND, SPANS, TILES, Edges, Rule, TileLists
from regard.masks.algebra import And, Mask
from regard.masks.prefix import Prefix
from regard.masks.tiles import FULL, PARTIAL, grid
from regard.values import Shape, encode

FAR = 1 << 30
"""A distance beyond every length."""


_PADDED = 128
"""Rows of a mask lie in memory in so many at a time: a tile may read beyond the last query."""


@dataclass(frozen=True)
class Rules:
    """The rules of a mask in tiles of one size: the keys of each row tile, and the rows of each key
    tile."""

    by_rows: Rule
    by_keys: Rule


def rule_of(
    mask: Mask | None, shape: Shape, tile: tuple[int, int], device: torch.device, *, by_keys: bool
) -> Rule:
    """The rule of a bound mask for tiles of so many queries and keys."""
    if mask is None:
        return Rule(ALL, 0, 0, None)
    simple = _simple(mask)
    if simple is not None:
        (low, high), limits = simple
        low, high = (int(max(-FAR, min(edge, FAR))) for edge in (low, high))
        everything = low <= 1 - shape.Q and high >= shape.K - 1
        kind = ALL if everything else BAND
        return Rule(kind, low, high, _whole(limits, shape, device))
    device = _where(mask, device)
    runs = _runs_of(mask, shape, device)
    if runs is None:
        lists: Rules = _MADE.find(
            mask, shape, tile, device, lambda: _lists(mask, shape, tile, device)
        )
        return lists.by_keys if by_keys else lists.by_rows
    # One of the two is made in a few operations, and a step of generating needs no more.
    edges: Rule = _MADE.find(
        mask, shape, (*tile, by_keys), device, lambda: _edges(runs, shape, tile, by_keys=by_keys)
    )
    return edges


def is_compact(mask: Mask | None, shape: Shape, device: torch.device) -> bool:
    """Whether a few numbers describe the mask to a kernel: a band, limits of keys, or runs of them;
    else it takes lists of tiles."""
    return (
        mask is None or is_simple(mask) or _runs_of(mask, shape, _where(mask, device)) is not None
    )


def _where(mask: Mask, device: torch.device) -> torch.device:
    """Where tensors have no numbers, a mask still has its own."""
    return mask.device if device.type == "meta" else device


class Runs(NamedTuple):
    """The first key that each query sees, and the first behind them: [b or 1, h or 1, Q]."""

    first: Tensor
    stop: Tensor


def _runs_of(mask: Mask, shape: Shape, device: torch.device) -> Runs | None:
    def made() -> Runs | None:
        found = mask.spans(shape, device)
        if found is None or not bool(found.sure):
            return None
        first, stop = torch.broadcast_tensors(found.first, found.stop)
        return Runs(first.contiguous(), stop.contiguous())

    runs: Runs | None = _MADE.find(mask, shape, None, device, made)
    return runs


def sees_all(mask: Mask | None, shape: Shape) -> bool:
    """Whether a mask hides nothing, as far as that is plain."""
    band = (-math.inf, math.inf) if mask is None else mask.band()
    return band is not None and band[0] <= 1 - shape.Q and band[1] >= shape.K - 1


def is_simple(mask: Mask | None) -> bool:
    """Whether a kernel can compute with the mask as numbers."""
    return mask is None or _simple(mask) is not None


def _simple(mask: Mask) -> tuple[tuple[float, float], Tensor | None] | None:
    """A band and key limits that together are the mask, if there are such."""
    band = mask.band()
    if band is not None:
        return band, None
    if isinstance(mask, Prefix):
        return (-math.inf, math.inf), torch.as_tensor(mask.limit)
    if isinstance(mask, And):
        left, right = _simple(mask.left), _simple(mask.right)
        if left is None or right is None:
            return None
        (low, high), limits = left
        (low2, high2), limits2 = right
        if limits is not None and limits2 is not None:
            limits2 = torch.minimum(limits, limits2)
        return (max(low, low2), min(high, high2)), limits if limits2 is None else limits2
    return None


def _whole(limits: Tensor | None, shape: Shape, device: torch.device) -> Tensor | None:
    if limits is None:
        return None
    if limits.device != device:  # a number: what is bound to tensors is where the tensors are
        return torch.full((shape.B,), int(limits), dtype=torch.int32, device=device)
    return limits.to(torch.int32).expand(shape.B).contiguous()


class _Store:
    """What was made of masks used lately: the layers of a model share a mask, and so its rules."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: OrderedDict[tuple[object, ...], tuple[Mask, list[Tensor], Any]] = OrderedDict()

    def find(
        self,
        mask: Mask,
        shape: Shape,
        tile: tuple[int, ...] | None,
        device: torch.device,
        make: Callable[[], Any],
    ) -> Any:
        text, integers, floats, tensors = encode([mask], here=True)
        if any(t.is_inference() for t in tensors):
            # Nobody counts how often such a tensor is written to.
            return make()
        # Tensors are held as long as their entry, so that no address comes to mean another; so is
        # the mask, whose functions are known by number.
        marks = tuple((t.data_ptr(), t._version, t.device, *t.shape, *t.stride()) for t in tensors)
        key = (text, *integers, *floats, marks, shape, tile, device)
        graph = capturing()
        if key in self.held:
            self.held.move_to_end(key)
            found = self.held[key][2]
            if graph:
                hold(found)
            return found
        made = make()
        if graph:
            return made
        self.held[key] = (mask, tensors, made)
        if len(self.held) > self.room:
            self.held.popitem(last=False)
        return made


_MADE = _Store(room=32)


def _edges(runs: Runs, shape: Shape, tile: tuple[int, int], *, by_keys: bool) -> Rule:
    """The rule for runs of keys."""
    batch, heads, Q = runs.first.shape
    rows = max(1, -(-Q // _PADDED)) * _PADDED
    many = (runs.stop - runs.first).clamp_min(0)
    first, many = (
        torch.nn.functional.pad(t, (0, rows - Q)).to(torch.int32) for t in (runs.first, many)
    )
    apart = (0 if batch == 1 else heads, 0 if heads == 1 else 1)
    edges = Edges(first, many, _tile_edges(runs, shape, tile, by_keys=by_keys), tile[by_keys], rows)
    return Rule(SPANS, 0, 0, None, edges, *apart)


def _tile_edges(runs: Runs, shape: Shape, tile: tuple[int, int], *, by_keys: bool) -> Tensor:
    """Start, begin and end of full tiles, and stop of the loop of each row tile, or key tile.

    A row tile's keys are those from the least first one to the greatest last one, and full between
    the greatest first and the least last one. A key tile's rows are found in the same four numbers
    of all row tiles, made ascending: where they are not, a loop is longer than it need be, and its
    tiles are partial, not wrong.
    """
    BM, BN = tile
    tiles, far = -(-shape.Q // BM), shape.K + BN
    sees = runs.stop > runs.first
    # Rows that see nothing make no tile longer, and no tile full: before all others they count
    # as if they ended at once, behind them as if they never began.
    leading = sees.cumsum(-1) == 0

    def by_tile(t: Tensor, unseen: Tensor | int, beyond: int) -> Tensor:
        t = torch.nn.functional.pad(
            torch.where(sees, t, unseen), (0, tiles * BM - shape.Q), value=beyond
        )
        return t.reshape(*t.shape[:-1], tiles, BM)

    least_first = by_tile(runs.first, far, far).amin(-1)
    most_stop = by_tile(runs.stop, 0, 0).amax(-1)
    most_first = by_tile(runs.first, torch.where(leading, 0, far), 0).amax(-1)
    least_stop = by_tile(runs.stop, torch.where(leading, 0, far), far).amin(-1)
    if not by_keys:
        start = torch.minimum(least_first // BN * BN, most_stop)
        full_start = (most_first + BN - 1) // BN * BN
        full_stop = least_stop.clamp_max(shape.K) // BN * BN
        return _four(start, full_start, full_stop, most_stop)
    key = torch.arange(0, max(shape.K, 1), BN, device=runs.first.device)
    key = key.expand(*runs.first.shape[:2], -1).contiguous()
    find = partial(torch.searchsorted, out_int32=False)
    begin = find(most_stop.cummax(-1).values, key, right=True)
    end = find(_descend(least_first), key + BN)
    full_begin = find(_descend(least_stop), key + BN)
    full_end = find(most_first.cummax(-1).values, key, right=True).clamp_max(shape.Q // BM)
    stop = (end * BM).clamp_max(shape.Q)
    return _four(begin * BM, full_begin * BM, full_end * BM, stop)


def _descend(t: Tensor) -> Tensor:
    """The least of each number and all behind it, which ascend."""
    return t.flip(-1).cummin(-1).values.flip(-1).contiguous()


def _four(start: Tensor, full_start: Tensor, full_stop: Tensor, stop: Tensor) -> Tensor:
    none = full_start >= full_stop
    stop = torch.maximum(start, stop)
    full_start, full_stop = (torch.where(none, start, edge) for edge in (full_start, full_stop))
    return torch.stack((start, full_start, full_stop, stop), -1).to(torch.int32).contiguous()


def _lists(mask: Mask, shape: Shape, tile: tuple[int, int], device: torch.device) -> Rules:
    states = grid(mask, shape, *tile, device, exact=False).clone()
    # A tile that sticks out over the last query or key is never full.
    if shape.Q % tile[0]:
        states[:, :, -1].clamp_max_(PARTIAL)
    if shape.K % tile[1]:
        states[..., -1].clamp_max_(PARTIAL)
    partial = (states == PARTIAL).nonzero()
    bits, table = _bits(mask, shape, tile, partial)
    full = (states == FULL).nonzero()
    return Rules(
        _rule_of_lists(states.shape, full, partial, table, bits, rows=True),
        _rule_of_lists(states.shape, full, partial, table, bits, rows=False),
    )


def _rule_of_lists(
    grid: torch.Size, full: Tensor, partial: Tensor, table: Tensor, bits: Tensor, *, rows: bool
) -> Rule:
    batch, heads, by_rows, by_keys = grid
    lists = by_rows if rows else by_keys
    full_start, full_tiles, _ = _compressed(grid, full, rows=rows)
    part_start, part_tiles, order = _compressed(grid, partial, rows=rows)
    tiles = TileLists(
        full_start, full_tiles, part_start, part_tiles, table[order].to(torch.int32), bits
    )
    apart = (0 if batch == 1 else heads * lists, 0 if heads == 1 else lists)
    return Rule(TILES, 0, 0, None, tiles, *apart)


def _compressed(grid: torch.Size, found: Tensor, *, rows: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles as compressed lists, by row tile or by key tile: starts, tiles, and their order."""
    batch, heads, by_rows, by_keys = grid
    b, h, tq, tk = found.unbind(1)
    owner, tile, n = (tq, tk, by_rows) if rows else (tk, tq, by_keys)
    owner = (b * heads + h) * n + owner
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=batch * heads * n)
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    # One entry too many, so that an empty list still has an address.
    tiles = torch.nn.functional.pad(tile[order], (0, 1)).to(torch.int32)
    return start, tiles, order


def _bits(
    mask: Mask, shape: Shape, tile: tuple[int, int], partial: Tensor
) -> tuple[Tensor, Tensor]:
    """The pairs of partial tiles, one bit each, and which table is whose."""
    b, h, tq, tk = partial.unbind(1)
    q0, k0 = tq * tile[0], tk * tile[1]
    table = torch.arange(len(partial), device=partial.device)
    if mask.relative:
        distance, table = torch.unique(k0 - q0, return_inverse=True)
        q0 = (-distance).clamp_min(0)
        b, h, k0 = torch.zeros_like(q0), torch.zeros_like(q0), q0 + distance
    bits = torch.zeros(
        max(len(q0), 1), tile[0], tile[1] // 8, dtype=torch.uint8, device=partial.device
    )
    worth = 1 << torch.arange(8, device=partial.device)
    q = torch.arange(tile[0], device=partial.device)
    k = torch.arange(tile[1], device=partial.device)
    step = max(1, (1 << 24) // (tile[0] * tile[1]))
    for start in range(0, len(q0), step):
        some = slice(start, start + step)
        rows = (q0[some, None] + q)[:, :, None]
        keys = (k0[some, None] + k)[:, None, :]
        if not mask.relative:
            rows, keys = rows.clamp_max(shape.Q - 1), keys.clamp_max(shape.K - 1)
        seen = mask.allows(b[some, None, None], h[some, None, None], rows, keys)
        seen = seen.expand(len(rows), tile[0], tile[1]).unflatten(-1, (-1, 8))
        bits[some] = (seen * worth).sum(-1).to(torch.uint8)
    return bits, torch.nn.functional.pad(table, (0, 1))
