"""Gradients of questions about the weights: logits are computed again, tile by tile.

With p = exp(s - lse) and the gradient d of each weight,

    ∂/∂s = p · d,   ∂/∂lse = -Σ p · d   (summed over a row).

A sum over queries or over a cell gives each of its pairs the gradient of the sum; a maximum gives
its gradient to the pairs that attain it, in equal parts. What the lse depends on is the business of
the forward pass that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends.contract import Pool
from regard.backends.passes import Given
from regard.backends.tiled.pair_gradients import PairGradients
from regard.backends.tiled.second_pass.norms import Norm, norm_of
from regard.backends.tiled.second_pass.tiled_pass import Overlap, Pooling, TiledPass, cuts, weigh
from regard.backends.tiled.tiles import Cut, RowTile, slabs
from regard.inputs import AttentionInputs

Pairs = Float[Tensor, "b h q k"]
Asks = Callable[[RowTile, Cut, Pairs], Pairs]
"""The gradient of each pair of a cut, from what the pairs are: weights, or logits."""


class Learned(NamedTuple):
    """What a question gives to learn from: through the lse, where it asks for weights, and through
    what logits are made of."""

    lse: Float[Tensor, "b h q"] | None
    given: Given


class QuestionGradients:
    """Gradients of the answers of a second pass, whichever it was."""

    @torch.no_grad()
    def received(self, x: AttentionInputs, lse: Tensor, g: Tensor, *, bias: bool) -> Learned:
        def asks(tile: RowTile, cut: Cut, p: Pairs) -> Pairs:
            here = (tile.slab.batch, tile.slab.heads, cut.keys)
            return g[here].to(p.dtype)[:, :, None].expand_as(p)

        return of_weights(x, lse, asks, bias=bias)

    @torch.no_grad()
    def pooled(
        self,
        x: AttentionInputs,
        lse: Tensor,
        g: Float[Tensor, "b h rows columns"],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
        *,
        bias: bool,
    ) -> Learned:
        cells = (g.shape[-2], g.shape[-1])
        rows, columns = Pooling(queries, cells[0], pool, g), Pooling(keys, cells[1], pool, g)
        regions = _Regions(rows, columns)
        if pool == "max":
            largest = TiledPass().pooled(x, lse, cells, queries, keys, pool)
            ties = torch.zeros_like(g)
            wide, norm = norm_of(x, lse)
            for tile, cut in cuts(wide):
                found = regions.meet(tile, cut)
                if found is not None:
                    p = weigh(tile, tile.logits(cut), norm)[found.inside]
                    regions.add_up(ties, found, p.to(lse.dtype) == found.of(largest))
            g = g / ties.clamp_min(1)
        elif pool == "mean":
            g = g / (rows.edges.diff()[:, None] * columns.edges.diff())

        def asks(tile: RowTile, cut: Cut, p: Pairs) -> Pairs:
            asked, found = torch.zeros_like(p), regions.meet(tile, cut)
            if found is None:
                return asked
            mine = found.of(g).to(p.dtype)
            if pool == "max":
                mine = mine * (p[found.inside].to(lse.dtype) == found.of(largest))
            asked[found.inside] = mine
            return asked

        return of_weights(x, lse, asks, bias=bias)

    @torch.no_grad()
    def mean_logit(self, x: AttentionInputs, g: Tensor, *, bias: bool) -> Learned:
        count = g.new_zeros(x.shape[:3])
        for tile, cut in cuts(x):
            count[tile.where] += (tile.logits(cut).flatten(1, 2) != -math.inf).sum(-1)
        share = g / count.clamp_min(1)

        def asks(tile: RowTile, _: Cut, s: Pairs) -> Pairs:
            return share[tile.where][..., None].to(s.dtype).masked_fill(s == -math.inf, 0.0)

        return _of_logits(x, asks, bias=bias)

    @torch.no_grad()
    def max_logit(self, x: AttentionInputs, g: Tensor, *, bias: bool) -> Learned:
        # Found again, since another backend rounds otherwise.
        largest = g.new_full(x.shape[:3], -math.inf, dtype=x.compute_dtype)
        for tile, cut in cuts(x):
            here = largest[tile.where]
            torch.maximum(here, tile.logits(cut).flatten(1, 2).amax(-1), out=here)
        ties = torch.zeros_like(largest)
        for tile, cut in cuts(x):
            s = tile.logits(cut).flatten(1, 2)
            ties[tile.where] += (s == largest[tile.where][..., None]).sum(-1)
        share = (g / ties.clamp_min(1)).masked_fill(largest == -math.inf, 0.0)

        def asks(tile: RowTile, _: Cut, s: Pairs) -> Pairs:
            first = s == largest[tile.where][..., None]
            return share[tile.where][..., None].to(s.dtype) * first

        return _of_logits(x, asks, bias=bias)


class _Met(NamedTuple):
    """Where the pairs of a cut meet the cells of a map."""

    here: tuple[slice, slice]
    rows: Overlap
    columns: Overlap

    @property
    def inside(self) -> tuple[slice, slice, slice, slice]:
        """Which pairs of the cut they are."""
        every = slice(None)
        return every, every, self.rows.inside, self.columns.inside

    def of(self, whole: Float[Tensor, "all_b all_h rows columns"]) -> Pairs:
        """What the cell of each pair has."""
        return whole[self.here][..., self.rows.cell, :][..., self.columns.cell]


class _Regions(NamedTuple):
    rows: Pooling
    columns: Pooling

    def meet(self, tile: RowTile, cut: Cut) -> _Met | None:
        rows, columns = self.rows.overlap(tile.rows), self.columns.overlap(cut.keys)
        if rows is None or columns is None:
            return None
        return _Met((tile.slab.batch, tile.slab.heads), rows, columns)

    def add_up(
        self,
        whole: Float[Tensor, "b h rows columns"],
        at: _Met,
        pairs: Bool[Tensor, "some_b some_h q k"],
    ) -> None:
        """Add to each cell how many pairs of it there are."""
        columns = whole.new_zeros(*pairs.shape[:3], whole.shape[-1])
        columns.index_add_(-1, at.columns.cell, pairs.to(whole.dtype))
        part = whole.new_zeros(*pairs.shape[:2], *whole.shape[-2:])
        whole[at.here] += part.index_add_(-2, at.rows.cell, columns)


def of_weights(
    x: AttentionInputs,
    lse: Float[Tensor, "b h q"],
    asks: Asks,
    *,
    bias: bool,
    queries: tuple[int, int] | None = None,
) -> Learned:
    """The gradient of what is asked of weights; of some queries alone, where that is said."""
    wide, norm = norm_of(x, lse)
    d_lse = torch.zeros_like(norm.lse)
    given = _by_tiles(x, wide, asks, bias=bias, norm=norm, d_lse=d_lse, queries=queries)
    return Learned(d_lse.to(lse.dtype), given)


def _of_logits(x: AttentionInputs, asks: Asks, *, bias: bool) -> Learned:
    return Learned(None, _by_tiles(x, x, asks, bias=bias))


def _by_tiles(
    x: AttentionInputs,
    wide: AttentionInputs,
    asks: Asks,
    *,
    bias: bool,
    norm: Norm | None = None,
    d_lse: Float[Tensor, "b h q"] | None = None,
    queries: tuple[int, int] | None = None,
) -> Given:
    start, stop = (0, x.shape.Q) if queries is None else queries
    found = PairGradients(replace(wide, comparison=x.comparison), bias=bias)
    for slab in slabs(wide):
        for tile in slab.row_tiles():
            if tile.rows.start >= stop or tile.rows.stop <= start:
                continue
            dq = torch.zeros_like(tile.q)
            for cut in tile.cuts:
                s, slope = tile.logits_and_slope(cut)
                shape = s.shape
                pairs = s.flatten(1, 2) if norm is None else weigh(tile, s, norm)
                ds = asks(tile, cut, pairs)
                if d_lse is not None:
                    ds = pairs * ds
                    d_lse[tile.where] -= ds.sum(-1)
                dq += found.add(tile, cut, ds.reshape(shape), slope)
            tile.put(found.q, dq.to(found.q.dtype))
    return Given(found.q, found.k, x.v.new_zeros(()), None, found.comparison, found.bias)
