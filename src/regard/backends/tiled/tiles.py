"""Going over the pairs tile by tile.

A call is cut into slabs (some batch entries and heads, so that a tile of logits stays in cache),
each slab into row tiles (some queries), each row tile into cuts (runs of keys that hold allowed
pairs). Keys that no query of the row tile may see are never touched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends.dropout import kept
from regard.backends.poison import all_finite, finite
from regard.backends.tiled.columns import columns
from regard.backends.tiled.loop import loop_for
from regard.backends.tiled.units import PairUnits, scratch_of, unit_loop
from regard.cancellation import step
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask, pairs
from regard.masks.tiles import EMPTY, FULL, PARTIAL, grid
from regard.scores.comparison import Dot, TanhSum
from regard.values import Shape

LITTLE = 1 << 22
"""Multiplications that take no longer than to find out which tiles a mask leaves empty, of few
queries, for whom each key is read from memory."""
LITTLE_IN_TILES = 1 << 27
"""The same of many queries and few keys, of which a part is spared at best."""
MANY_QUERIES, FEW_KEYS = 32, 256
KEY_TILE = 128
"""Keys per judged tile; neighbouring tiles of one state are computed together."""


@dataclass(frozen=True)
class TileSize:
    """How much of a call is looked at in one go."""

    heads: int
    rows: int
    keys: int


def tile_size(x: AttentionInputs) -> TileSize:
    """Tiles whose logits and weights fit the cores' caches, or fill a GPU."""
    on_cpu = x.q.device.type == "cpu"
    cores = torch.get_num_threads() if on_cpu else 32
    # Long rows keep Python out of the way; on a CPU short calls want fewer of them at a time.
    rows = 256 if x.shape.Q >= 4096 or not on_cpu else 128
    area = (cores << 18 if on_cpu else 1 << 27) // scratch_of(x)
    keys = max(KEY_TILE, min(1024 if on_cpu else 4096, area // rows // KEY_TILE * KEY_TILE))
    keys = min(keys, max(KEY_TILE, -(-x.shape.K // KEY_TILE) * KEY_TILE))
    rows = max(1, min(rows // x.group, area // keys // x.group, max(x.shape.Q, 1)))
    return TileSize(max(cores, area // (rows * x.group * keys)), rows, keys)


@dataclass(frozen=True)
class Cut:
    """A run of keys that a row tile looks at, and the parts of it where some pairs are hidden."""

    keys: slice
    partial: tuple[tuple[slice, Bool[Tensor, "b g r q _"]], ...] = ()

    def fill(self, t: Float[Tensor, "b g r q k"], value: float) -> Float[Tensor, "b g r q k"]:
        """Write a value where pairs are hidden, in place."""
        loop = loop_for(t.device, t.dtype) if t.is_contiguous() else None
        for keys, hidden in self.partial:
            if loop is None:
                t[..., keys].masked_fill_(hidden, value)
            else:
                loop.fill(t, keys, hidden, value)
        return t


class Slab:
    """Some batch entries and heads of a call, in the precision that scores are computed in."""

    def __init__(
        self,
        x: AttentionInputs,
        batch: slice,
        key_heads: slice,
        schedule: Schedule,
        is_finite: bool,
    ) -> None:
        self.batch, self.key_heads = batch, key_heads
        self.heads = slice(key_heads.start * x.group, key_heads.stop * x.group)
        everything = _is_all(x, batch, key_heads)
        self.x = x if everything else x.select(batch, self.heads, key_heads)
        self.schedule = schedule
        self.finite = is_finite

    @cached_property
    def q(self) -> Float[Tensor, "b g r q d"]:
        q: Tensor = self.x.q.to(self.x.compute_dtype).unflatten(1, (-1, self.x.group))
        return q

    @cached_property
    def k(self) -> Float[Tensor, "b g k d"]:
        return self.x.k.to(self.x.compute_dtype)

    @cached_property
    def v(self) -> Float[Tensor, "b g k e"]:
        return self.x.v.to(self.x.compute_dtype)

    @cached_property
    def k_finite(self) -> Float[Tensor, "b g k d"]:
        """Keys without NaN: a hidden NaN must not spoil the products it takes no part in."""
        return self._finite(self.k)

    @cached_property
    def keys_are_finite(self) -> bool:
        """Whether no key can have a logit of minus infinity by itself."""
        return all_finite(self.k)

    @cached_property
    def v_finite(self) -> Float[Tensor, "b g k e"]:
        return self._finite(self.v)

    @cached_property
    def units(self) -> PairUnits | None:
        """Additive attention's units, where the compiled loop makes them."""
        return self._units(torch.add(self.q, self.q, alpha=0.0), self.k)

    @cached_property
    def units_finite(self) -> PairUnits | None:
        if self.finite or self.units is None:
            return self.units
        return self._units(finite(self.q), self.k_finite)

    def _units(self, q: Tensor, k: Tensor) -> PairUnits | None:
        loop, how = unit_loop(self.x), self.x.comparison
        return PairUnits(loop, q, k, how.w) if loop and isinstance(how, TanhSum) else None

    def _finite(self, t: Tensor) -> Tensor:
        return t if self.finite else finite(t)

    def rows(self) -> Iterator[tuple[slice, list[Cut]]]:
        """Runs of queries, and the cuts of keys that each may look at."""
        for index, start in enumerate(range(0, self.x.shape.Q, self.schedule.size.rows)):
            stop = min(start + self.schedule.size.rows, self.x.shape.Q)
            yield slice(start, stop), self.schedule.cuts(index)

    def row_tiles(self) -> Iterator[RowTile]:
        for rows, cuts in self.rows():
            yield RowTile(self, rows, cuts)


class RowTile:
    """Some queries of a slab, and the cuts of keys that they may look at."""

    def __init__(self, slab: Slab, rows: slice, cuts: list[Cut]) -> None:
        self.slab, self.rows, self.cuts = slab, rows, cuts
        q = slab.q[:, :, :, rows]
        # A query that is not finite has no logits: 0 · ∞ is NaN. Its products with keys could all
        # be -inf, and the row would pass for one that sees nothing.
        self.q = torch.add(q, q, alpha=0.0)
        how = slab.x.comparison
        self._scaled = (self.q * how.scale).flatten(2, 3) if isinstance(how, Dot) else None

    @property
    def where(self) -> tuple[slice, slice, slice]:
        """This tile's place in tensors [B, H, Q, ...]."""
        return self.slab.batch, self.slab.heads, self.rows

    @cached_property
    def q_finite(self) -> Float[Tensor, "b g r q d"]:
        return self.slab._finite(self.q)

    def take(self, whole: Tensor) -> Tensor:
        """This tile's part of a tensor [B, H, Q, ...], as [B, G, R, Q, ...]."""
        part: Tensor = whole[self.where].unflatten(1, (-1, self.slab.x.group))
        return part

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write a part [B, G, R, Q, ...] into its place."""
        whole[self.where] = part.flatten(1, 2)

    def logits(self, cut: Cut, into: Tensor | None = None) -> Float[Tensor, "b g r q k"]:
        """Logits of one cut, minus infinity where hidden; `into` is memory to use."""
        return self._finish(self._capped(cut, into), cut)

    def logits_and_slope(self, cut: Cut) -> tuple[Tensor, Tensor | None]:
        """Logits of one cut, and the derivative of the soft-cap where there is one."""
        s = self._capped(cut, None)
        cap = self.slab.x.softcap
        slope = None if cap is None else 1 - (s / cap).square_()
        return self._finish(s, cut), slope

    def _capped(self, cut: Cut, into: Tensor | None) -> Tensor:
        step()
        x, k = self.slab.x, self.slab.k[:, :, cut.keys]
        shape = (*self.q.shape[:4], k.shape[2])
        if self.slab.units is not None:
            s = self.slab.units.logits(self.rows, cut.keys)
        elif self._scaled is None:
            s = x.comparison.logits(self.q, k)
        elif into is None:
            s = torch.matmul(self._scaled, columns(k, self._scaled.shape[2])).view(shape)
        else:
            s = into[: math.prod(shape)].view(shape)
            n, rows, keys = shape[0] * shape[1], shape[2] * shape[3], shape[4]
            # A plain batched product; keys of several batch entries may need a copy to be one.
            torch.bmm(
                self._scaled.reshape(n, rows, -1),
                columns(k.reshape(n, keys, -1), rows),
                out=s.view(n, rows, keys),
            )
        return s if x.softcap is None else s.div_(x.softcap).tanh_().mul_(x.softcap)

    def _finish(self, s: Tensor, cut: Cut) -> Tensor:
        if self.slab.x.bias is not None:
            bias = self.slab.x.bias.within(self.rows, cut.keys, s.device)
            s += self._grouped(bias.to(s.dtype))
        return cut.fill(s, -math.inf)

    def places(self, cut: Cut) -> tuple[Tensor, Tensor]:
        """The indices of this tile's queries and of a cut's keys."""
        device = self.q.device
        q = torch.arange(self.rows.start, self.rows.stop, device=device)
        return q, torch.arange(cut.keys.start, cut.keys.stop, device=device)

    def keeps(self, cut: Cut) -> Bool[Tensor, "b g r q k"]:
        """Which weights of a cut dropout leaves."""
        x = self.slab.x
        assert x.seed is not None
        ranges = (self.slab.batch, self.slab.heads)
        b, h = (torch.arange(s.start, s.stop, device=self.q.device) for s in ranges)
        return self._grouped(kept(x.seed, x.dropout, b, h, *self.places(cut)))

    def _grouped(self, t: Tensor) -> Tensor:
        return grouped(t, self.slab.x.group)


def grouped(t: Tensor, group: int) -> Tensor:
    """[B, H, ...] as [B, G, R, ...]; a head axis of 1 stays 1."""
    return t.unsqueeze(2) if t.shape[1] == 1 else t.unflatten(1, (-1, group))


class Schedule:
    """Which keys each row tile must look at, under one mask. With `all_pairs` the only row tile
    looks at all keys."""

    def __init__(
        self,
        mask: Mask | None,
        shape: Shape,
        group: int,
        size: TileSize,
        device: torch.device,
        *,
        all_pairs: bool,
    ) -> None:
        self.mask, self.shape, self.group, self.size, self.device = mask, shape, group, size, device
        self._seen: dict[tuple[int, int, int], Tensor] = {}
        if mask is None:
            self._states = None
        elif all_pairs:
            self._states = [[PARTIAL] * -(-shape.K // KEY_TILE)]
        else:
            states = grid(mask, shape, size.rows, KEY_TILE, device, exact=False).flatten(0, 1)
            # A tile is skipped or taken whole only if all batch entries and heads agree.
            full, empty = (states == FULL).all(0), (states == EMPTY).all(0)
            self._states = (1 + full.to(torch.int8) - empty.to(torch.int8)).tolist()

    def cuts(self, row_tile: int) -> list[Cut]:
        """The runs of keys that a row tile looks at."""
        if self._states is None:
            return [Cut(keys) for keys in self._chunks(0, self.shape.K)]
        found: list[Cut] = []
        states = self._states[row_tile]
        for first, last in _runs([state != EMPTY for state in states]):
            for keys in self._chunks(first * KEY_TILE, min(last * KEY_TILE, self.shape.K)):
                inside = states[keys.start // KEY_TILE : -(-keys.stop // KEY_TILE)]
                partial = []
                for start, stop in _runs([state == PARTIAL for state in inside]):
                    part = slice(start * KEY_TILE, min(stop * KEY_TILE, keys.stop - keys.start))
                    where = slice(keys.start + part.start, keys.start + part.stop)
                    partial.append((part, self._hidden(row_tile, where)))
                found.append(Cut(keys, tuple(partial)))
        return found

    def _chunks(self, start: int, stop: int) -> Iterator[slice]:
        for key in range(start, stop, self.size.keys):
            yield slice(key, min(key + self.size.keys, stop))

    def _hidden(self, row_tile: int, keys: slice) -> Tensor:
        assert self.mask is not None
        start = row_tile * self.size.rows
        stop = min(start + self.size.rows, self.shape.Q)
        # Under a mask of distances, tiles at the same distance from the diagonal are alike.
        alike = (keys.start - start, keys.stop - start, stop - start)
        if self.mask.relative and alike in self._seen:
            return self._seen[alike]
        q = torch.arange(start, stop, device=self.device)
        k = torch.arange(keys.start, keys.stop, device=self.device)
        hidden = grouped(~pairs(self.mask, q, k), self.group).contiguous()
        if self.mask.relative and len(self._seen) < 8:
            self._seen[alike] = hidden
        return hidden


def _runs(flags: list[bool]) -> list[tuple[int, int]]:
    """The runs of True: first, and past the last."""
    found, place = [], 0
    for flag, run in itertools.groupby(flags):
        length = len(list(run))
        if flag:
            found.append((place, place + length))
        place += length
    return found


def _is_little(x: AttentionInputs) -> bool:
    """Whether one batch entry is sooner computed than it is found out what of it is masked, as when
    a token is generated."""
    _, H, Q, K = x.shape
    in_tiles = Q >= MANY_QUERIES and K <= FEW_KEYS
    most = LITTLE_IN_TILES if in_tiles else LITTLE
    return H * Q * K * (x.q.shape[-1] + x.v.shape[-1]) <= most


def takes_all(x: AttentionInputs, rows: int) -> bool:
    """Whether all pairs are computed, whatever a mask leaves of them."""
    return rows >= x.shape.Q and _is_little(x)


def spans(x: AttentionInputs, size: TileSize) -> Iterator[tuple[slice, slice]]:
    """Batch entries and key heads that are computed together. Where the mask differs between batch
    entries, each is computed alone, unless that is little work."""
    B, groups = x.k.shape[:2]
    heads = max(1, min(groups, size.heads))
    alike = x.mask is None or x.mask.batch == 1 or _is_little(x)
    together = max(1, size.heads // max(groups, 1)) if alike else 1
    for b in range(0, B, together):
        for g in range(0, groups, heads):
            yield slice(b, min(b + together, B)), slice(g, min(g + heads, groups))


def _is_all(x: AttentionInputs, batch: slice, key_heads: slice) -> bool:
    """Whether these are all batch entries and heads."""
    B, groups = x.k.shape[:2]
    return batch == slice(0, B) and key_heads == slice(0, groups)


def slabs(
    x: AttentionInputs, size: TileSize | None = None, is_finite: bool | None = None
) -> Iterator[Slab]:
    """The slabs of a call."""
    size = size or tile_size(x)
    if is_finite is None:
        is_finite = x.mask is None or all_finite(x.q, x.k, x.v)
    schedule: Schedule | None = None
    for batch, key_heads in spans(x, size):
        mask = x.mask
        if mask is not None and not _is_all(x, batch, key_heads):
            mask = mask.select(batch, slice(key_heads.start * x.group, key_heads.stop * x.group))
        if schedule is None or mask is not schedule.mask:
            schedule = Schedule(
                mask, x.shape, x.group, size, x.q.device, all_pairs=takes_all(x, size.rows)
            )
        yield Slab(x, batch, key_heads, schedule, is_finite)
