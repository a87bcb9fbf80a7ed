"""Questions about the weights, answered from q, k and lse without building n×n."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.contract import Pool, Top
from regard.backends.poison import finite
from regard.backends.precision import in_full_precision
from regard.backends.tiled.walk import Cut, RowTile, slabs
from regard.inputs import AttentionInputs
from regard.masks.algebra import pairs


def weights_of(tile: RowTile, cut: Cut, lse: Tensor) -> Float[Tensor, "b h q k"]:
    """The weights of one cut, from the lse of every row."""
    return weigh(tile, tile.logits(cut), lse)


def weigh(tile: RowTile, s: Float[Tensor, "b g r q k"], lse: Tensor) -> Float[Tensor, "b h q k"]:
    """Logits turned into weights, in place."""
    norm = tile.take(lse)
    # A row that sees nothing has only -inf logits, so any number will do.
    norm = torch.where(norm == -math.inf, 0.0, norm)[..., None]
    # Rows that are not finite leave what they do not see alone.
    hidden = None if tile.slab.finite else s == -math.inf
    p = s.sub_(norm).exp_()
    return (p if hidden is None else p.masked_fill_(hidden, 0.0)).flatten(1, 2)


def cuts(x: AttentionInputs) -> Iterator[tuple[RowTile, Cut]]:
    """Every run of keys that some queries may look at."""
    for slab in slabs(x):
        for tile in slab.row_tiles():
            for cut in tile.cuts:
                yield tile, cut


class TiledPass:
    """A walk over the tiles for each question."""

    @torch.no_grad()
    @in_full_precision
    def received(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"]
    ) -> Float[Tensor, "b h k"]:
        B, H, _, K = inputs.shape
        total = lse.new_zeros(B, H, K)
        for tile, cut in cuts(inputs):
            here = (tile.slab.batch, tile.slab.heads, cut.keys)
            total[here] += weights_of(tile, cut, lse).sum(-2)
        return total

    @in_full_precision
    def mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], keys: Int[Tensor, "k"]
    ) -> Float[Tensor, "b h q"]:
        step = max(1, (1 << 22) // max(len(keys) * inputs.shape.B * inputs.shape.H, 1))
        places = torch.arange(inputs.shape.Q, device=lse.device)
        parts = [
            _weights(_logits(inputs, inputs.q[:, :, run], some, keys), lse[:, :, run]).sum(-1)
            for some, run in _runs(places, step)
        ]
        return torch.cat(parts, -1) if parts else torch.zeros_like(lse)

    @torch.no_grad()
    @in_full_precision
    def top(self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], n: int) -> Top:
        n = min(n, inputs.shape.K)
        values = lse.new_full((*lse.shape, n), -1.0)
        indices = torch.full_like(values, -1, dtype=torch.int64)
        for tile, cut in cuts(inputs):
            s = tile.logits(cut)
            unseen = (s == -math.inf).flatten(1, 2)
            p = weigh(tile, s, lse).masked_fill_(unseen, -1.0)
            here = p.topk(min(n, p.shape[-1]), dim=-1)
            best = torch.cat([values[tile.where], here.values], -1)
            place = torch.cat([indices[tile.where], here.indices + cut.keys.start], -1)
            values[tile.where], order = best.topk(n, dim=-1)
            indices[tile.where] = place.gather(-1, order)
        indices.masked_fill_(values < 0, -1)
        return Top(values.clamp_min_(0), indices)

    @torch.no_grad()
    @in_full_precision
    def pooled(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Float[Tensor, "b h rows columns"]:
        B, H, _, _ = inputs.shape
        result = lse.new_zeros(B, H, *cells)
        rows_pool = Pooling(queries, cells[0], pool, lse)
        keys_pool = Pooling(keys, cells[1], pool, lse)
        for tile, cut in cuts(inputs):
            rows, columns = rows_pool.overlap(tile.rows), keys_pool.overlap(cut.keys)
            if rows is None or columns is None:
                continue
            p = weights_of(tile, cut, lse)
            finite = tile.slab.finite
            p = keys_pool.pool(p[..., columns.inside], columns, finite=finite)
            p = rows_pool.pool(p[..., rows.inside, :].mT, rows, finite=finite).mT
            here = result[tile.slab.batch, tile.slab.heads, rows.cells, columns.cells]
            torch.maximum(here, p, out=here) if pool == "max" else here.add_(p)
        return result

    @torch.no_grad()
    @in_full_precision
    def mean_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        B, H, Q, _ = inputs.shape
        total = inputs.q.new_zeros(B, H, Q, dtype=inputs.compute_dtype)
        count = torch.zeros_like(total)
        for tile, cut in cuts(inputs):
            s = tile.logits(cut).flatten(1, 2)
            hidden = s == -math.inf
            total[tile.where] += s.masked_fill_(hidden, 0.0).sum(-1)
            count[tile.where] += s.shape[-1] - hidden.sum(-1)
        return torch.where(count > 0, total / count.clamp_min(1), -math.inf)

    @in_full_precision
    def weights(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        queries: Int[Tensor, "some_q"],
        keys: Int[Tensor, "some_k"],
    ) -> Float[Tensor, "b h some_q some_k"]:
        return _weights(chosen_logits(inputs, queries, keys), lse[..., queries])


def _weights(s: Float[Tensor, "b h q k"], lse: Float[Tensor, "b h q"]) -> Float[Tensor, "b h q k"]:
    hidden = s == -math.inf
    away = torch.where(hidden, 0.0, s - lse[..., None])
    return torch.where(hidden, 0.0, away.exp())


def _runs(places: Int[Tensor, "q"], step: int) -> Iterator[tuple[Int[Tensor, "some"], slice]]:
    """Places in order, some at a time: their indices, and where they are without copying."""
    for start in range(0, len(places), step):
        yield places[start : start + step], slice(start, start + step)


def chosen_logits(
    x: AttentionInputs, queries: Int[Tensor, "q"], keys: Int[Tensor, "k"]
) -> Float[Tensor, "b h q k"]:
    """Logits of chosen queries and keys, made of differentiable operations."""
    return _logits(x, x.q[:, :, queries], queries, keys)


def _logits(
    x: AttentionInputs,
    q: Float[Tensor, "b h q d"],
    queries: Int[Tensor, "q"],
    keys: Int[Tensor, "k"],
) -> Float[Tensor, "b h q k"]:
    """The same, where the vectors of the queries are at hand."""
    q, k = q.to(x.compute_dtype), x.k[:, :, keys].to(x.compute_dtype)
    broken = _broken(q)[..., None] | _broken(k).repeat_interleave(x.group, dim=1)[..., None, :]
    if torch.is_grad_enabled():
        # What is not finite stays in its own pair, but would spoil the gradients of others.
        q, k = finite(q), finite(k)
    s = x.comparison.logits(q.unflatten(1, (-1, x.group)), k).flatten(1, 2)
    s = s.masked_fill(broken, math.nan)
    if x.softcap is not None:
        s = x.softcap * torch.tanh(s / x.softcap)
    if x.bias is not None:
        s = s + x.bias.at(queries, keys).to(s.dtype)
    return s if x.mask is None else s.masked_fill(~pairs(x.mask, queries, keys), -math.inf)


def _broken(vectors: Float[Tensor, "b h n d"]) -> Bool[Tensor, "b h n"]:
    """Which vectors hold NaN or infinity. The largest number of each says so in one pass."""
    if not vectors.shape[-1]:
        return vectors.new_zeros(vectors.shape[:-1], dtype=torch.bool)
    largest: Tensor = torch.linalg.vector_norm(vectors.detach(), math.inf, -1)
    return ~largest.isfinite()


class Overlap(NamedTuple):
    """Where a run of places meets a region: inside the run, and the cells it touches."""

    inside: slice
    cells: slice
    cell: Int[Tensor, "n"]


class Pooling:
    """A region of m places in so many cells: place i is in cell ⌊i · cells / m⌋."""

    def __init__(self, region: tuple[int, int], cells: int, pool: Pool, like: Tensor) -> None:
        self.region, self.kind, self.like = region, pool, like
        place = torch.arange(region[1] - region[0], device=like.device)
        self.cell = torch.div(place * cells, len(place), rounding_mode="floor")
        self.edges = -(-torch.arange(cells + 1, device=like.device) * len(place) // cells)

    def overlap(self, run: slice) -> Overlap | None:
        start, stop = max(run.start, self.region[0]), min(run.stop, self.region[1])
        if start >= stop:
            return None
        cell = self.cell[start - self.region[0] : stop - self.region[0]]
        first, last = int(cell[0]), int(cell[-1])
        return Overlap(slice(start - run.start, stop - run.start), slice(first, last + 1), cell)

    def pool(
        self, p: Float[Tensor, "b h r n"], at: Overlap, *, finite: bool
    ) -> Float[Tensor, "b h r cells"]:
        """Pool the last axis into the cells it touches; a mean counts every place of a cell. What
        is not finite stays in its own."""
        local = at.cell - at.cells.start
        many = at.cells.stop - at.cells.start
        if self.kind == "max":
            whole = p.new_zeros(*p.shape[:-1], many)
            return whole.scatter_reduce_(-1, local.expand(p.shape), p, "amax")
        sizes = (self.edges[1:] - self.edges[:-1])[at.cells]
        if not finite:
            p = p / sizes[local] if self.kind == "mean" else p
            whole = p.new_zeros(*p.shape[:-1], many)
            return whole.scatter_add_(-1, local.expand(p.shape), p)
        share = torch.nn.functional.one_hot(local, many).to(p.dtype)
        if self.kind == "mean":
            share /= sizes
        return p @ share
