"""Questions about the weights, answered from q, k and lse without building n×n."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.contract import LogitSpread, Pool, SecondPass, Top
from regard.backends.precision import in_full_precision
from regard.backends.tiled.second_pass.chosen_logits import chosen_logits, logits_at, numbers_alone
from regard.backends.tiled.second_pass.norms import Norm, norm_of, norm_of_rows
from regard.backends.tiled.tiles import Cut, RowTile, slabs
from regard.inputs import AttentionInputs


def weights_of(tile: RowTile, cut: Cut, norm: Norm) -> Float[Tensor, "b h q k"]:
    """The weights of one cut, from what every row sums to."""
    return weigh(tile, tile.logits(cut), norm)


def weigh(tile: RowTile, s: Float[Tensor, "b g r q k"], norm: Norm) -> Float[Tensor, "b h q k"]:
    """Logits turned into weights, in place."""
    lse = tile.take(norm.lse)
    # A row that sees nothing has only -inf logits, so any number will do.
    lse = torch.where(lse == -math.inf, 0.0, lse)[..., None]
    # Rows that are not finite leave what they do not see alone.
    hidden = None if tile.slab.finite else s == -math.inf
    s = s.sub_(lse)
    if norm.rest is not None:
        s = s.sub_(tile.take(norm.rest)[..., None])
    p = s.exp_()
    return (p if hidden is None else p.masked_fill_(hidden, 0.0)).flatten(1, 2)


def cuts(x: AttentionInputs) -> Iterator[tuple[RowTile, Cut]]:
    """Every run of keys that some queries may look at."""
    for slab in slabs(x):
        for tile in slab.row_tiles():
            for cut in tile.cuts:
                yield tile, cut


class TiledPass(SecondPass):
    """One pass over the tiles for each question."""

    @torch.no_grad()
    @in_full_precision
    def received(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"]
    ) -> Float[Tensor, "b h k"]:
        B, H, _, K = inputs.shape
        x, norm = norm_of(inputs, lse)
        total = norm.lse.new_zeros(B, H, K)
        for tile, cut in cuts(x):
            here = (tile.slab.batch, tile.slab.heads, cut.keys)
            total[here] += weights_of(tile, cut, norm).sum(-2)
        return total.to(lse.dtype)

    @in_full_precision
    def mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], keys: Int[Tensor, "k"]
    ) -> Float[Tensor, "b h q"]:
        x, norm = norm_of(inputs, lse)
        step = max(1, (1 << 22) // max(len(keys) * x.shape.B * x.shape.H, 1))
        places = torch.arange(x.shape.Q, device=lse.device)
        parts = [
            _weights(logits_at(x, x.q[:, :, run], some, keys), norm.at(run)).sum(-1)
            for some, run in _runs(places, step)
        ]
        return torch.cat(parts, -1).to(lse.dtype) if parts else torch.zeros_like(lse)

    @torch.no_grad()
    @in_full_precision
    def first_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        places = torch.arange(max(inputs.shape.Q, 1), device=inputs.q.device)
        queries = places[: inputs.shape.Q]
        return logits_at(inputs, inputs.q, queries, places[:1]).squeeze(-1)

    @torch.no_grad()
    @in_full_precision
    def top(self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], n: int) -> Top:
        n = min(n, inputs.shape.K)
        x, norm = norm_of(inputs, lse)
        values = norm.lse.new_full((*lse.shape, n), -1.0)
        indices = torch.full_like(values, -1, dtype=torch.int64)
        for tile, cut in cuts(x):
            s = tile.logits(cut)
            unseen = (s == -math.inf).flatten(1, 2)
            p = weigh(tile, s, norm).masked_fill_(unseen, -1.0)
            here = p.topk(min(n, p.shape[-1]), dim=-1)
            best = torch.cat([values[tile.where], here.values], -1)
            place = torch.cat([indices[tile.where], here.indices + cut.keys.start], -1)
            values[tile.where], order = best.topk(n, dim=-1)
            indices[tile.where] = place.gather(-1, order)
        indices.masked_fill_(values < 0, -1)
        return Top(values.clamp_min_(0).to(lse.dtype), indices)

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
        x, norm = norm_of(inputs, lse)
        result = norm.lse.new_zeros(B, H, *cells)
        rows_pool = Pooling(queries, cells[0], pool, result)
        keys_pool = Pooling(keys, cells[1], pool, result)
        for tile, cut in cuts(x):
            rows, columns = rows_pool.overlap(tile.rows), keys_pool.overlap(cut.keys)
            if rows is None or columns is None:
                continue
            p = weights_of(tile, cut, norm)
            finite = tile.slab.finite
            p = keys_pool.pool(p[..., columns.inside], columns, finite=finite)
            p = rows_pool.pool(p[..., rows.inside, :].mT, rows, finite=finite).mT
            here = result[tile.slab.batch, tile.slab.heads, rows.cells, columns.cells]
            torch.maximum(here, p, out=here) if pool == "max" else here.add_(p)
        return result.to(lse.dtype)

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

    @torch.no_grad()
    @in_full_precision
    def logit_spread(self, inputs: AttentionInputs) -> LogitSpread:
        B, H, Q, _ = inputs.shape
        # How many, their mean, and squares of distances from it: those of two runs of keys give
        # those of both without the loss of digits that Σ s² - (Σ s)² has.
        count, mean, square = inputs.q.new_zeros(3, B, H, Q, dtype=inputs.compute_dtype)
        lowest = torch.full_like(count, math.inf)
        for tile, cut in cuts(inputs):
            s = tile.logits(cut).flatten(1, 2)
            hidden = s == -math.inf
            here = (s.shape[-1] - hidden.sum(-1)).to(s.dtype)
            s.masked_fill_(hidden, math.inf)
            lowest[tile.where] = torch.minimum(lowest[tile.where], s.amin(-1))
            middle = s.masked_fill_(hidden, 0.0).sum(-1) / here.clamp_min(1)
            away = s.sub_(middle[..., None]).masked_fill_(hidden, 0.0).square_().sum(-1)
            before, both = count[tile.where], (count[tile.where] + here).clamp_min(1)
            apart = middle - mean[tile.where]
            square[tile.where] += away + apart.square() * before * here / both
            mean[tile.where] += apart * here / both
            count[tile.where] += here
        return LogitSpread(square / count.clamp_min(1), lowest)

    @in_full_precision
    def logits(
        self,
        inputs: AttentionInputs,
        queries: Int[Tensor, "some_q"],
        keys: Int[Tensor, "some_k"],
    ) -> Float[Tensor, "b h some_q some_k"]:
        return chosen_logits(inputs, queries, keys)

    @in_full_precision
    def weights(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        queries: Int[Tensor, "some_q"],
        keys: Int[Tensor, "some_k"],
    ) -> Float[Tensor, "b h some_q some_k"]:
        x, norm = norm_of_rows(inputs, lse, queries)
        return _weights(chosen_logits(x, queries, keys), norm).to(lse.dtype)


def _weights(s: Float[Tensor, "b h q k"], norm: Norm) -> Float[Tensor, "b h q k"]:
    on_cpu = s.device.type == "cpu"
    if on_cpu and numbers_alone(s) and bool(norm.lse.isfinite().all()):
        # No row is empty or broken: -inf less a number is still -inf, whose exp is 0.
        s.sub_(norm.lse[..., None])
        return (s if norm.rest is None else s.sub_(norm.rest[..., None])).exp_()
    # A row that was found to see nothing gives nothing, whatever its logits are.
    hidden = (s == -math.inf) | (norm.lse[..., None] == -math.inf)
    away = s - norm.lse[..., None]
    if norm.rest is not None:
        away = away - norm.rest[..., None]
    return torch.where(hidden, 0.0, torch.where(hidden, 0.0, away).exp())


def _runs(places: Int[Tensor, "q"], step: int) -> Iterator[tuple[Int[Tensor, "some"], slice]]:
    """Places in order, some at a time: their indices, and where they are without copying."""
    for start in range(0, len(places), step):
        yield places[start : start + step], slice(start, start + step)


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
