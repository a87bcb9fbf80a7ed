"""The weights that fall on blocks of keys, added up tile by tile, and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.precision import in_full_precision
from regard.backends.tiled.second_pass.norms import norm_of
from regard.backends.tiled.second_pass.question_gradients import Learned, Pairs, of_weights
from regard.backends.tiled.second_pass.tiled_pass import cuts, weights_of
from regard.backends.tiled.tiles import Cut, RowTile
from regard.inputs import AttentionInputs


class ChosenBlocks(NamedTuple):
    """Which blocks of keys each block of queries keeps."""

    kept: Bool[Tensor, "b h query_blocks key_blocks"]
    queries: int
    keys: int
    """How many places a block has; the last may have fewer."""
    query_places: Int[Tensor, "q"] | None = None
    key_places: Int[Tensor, "k"] | None = None
    """Where queries and keys stand, if a call has only some of those that the blocks are of."""

    def pairs(self, tile: RowTile, cut: Cut) -> Bool[Tensor, "b h q k"]:
        """Whether the block of each pair of a cut is kept."""
        q, k = tile.places(cut)
        q = q if self.query_places is None else self.query_places[q]
        k = k if self.key_places is None else self.key_places[k]
        here = self.kept[tile.slab.batch, tile.slab.heads]
        return here[:, :, q // self.queries][..., k // self.keys]


class KeyBlocks(NamedTuple):
    """Keys in blocks of one size; the last may have fewer."""

    size: int
    many: int
    places: Int[Tensor, "k"] | None = None
    """Where keys stand, if a call has only some of those that the blocks are of."""

    def of(self, keys: Int[Tensor, "some"]) -> Int[Tensor, "some"]:
        """The block of each key."""
        return (keys if self.places is None else self.places[keys]) // self.size


class BlockMass:
    """Answers and gradients, for any backend's trace."""

    @torch.no_grad()
    @in_full_precision
    def kept(
        self, x: AttentionInputs, lse: Float[Tensor, "b h q"], blocks: ChosenBlocks
    ) -> Float[Tensor, "b h q"]:
        """The sum of each row's weights in the blocks that are kept."""
        x, norm = norm_of(x, lse)
        total = torch.zeros_like(norm.lse)
        for tile, cut in cuts(x):
            kept = blocks.pairs(tile, cut)
            total[tile.where] += weights_of(tile, cut, norm).masked_fill_(~kept, 0.0).sum(-1)
        return total.to(lse.dtype)

    @torch.no_grad()
    def pull_kept(
        self, x: AttentionInputs, lse: Tensor, g: Tensor, blocks: ChosenBlocks, *, bias: bool
    ) -> Learned:
        def asks(tile: RowTile, cut: Cut, p: Pairs) -> Pairs:
            return g[tile.where][..., None].to(p.dtype) * blocks.pairs(tile, cut)

        return of_weights(x, lse, asks, bias=bias)

    @torch.no_grad()
    @in_full_precision
    def summed(
        self,
        x: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        blocks: KeyBlocks,
        queries: tuple[int, int],
    ) -> Float[Tensor, "b some_q key_blocks"]:
        """The weights of some queries summed over all heads, for each block of keys."""
        x, norm = norm_of(x, lse)
        start, stop = queries
        total = norm.lse.new_zeros(x.shape.B, stop - start, blocks.many)
        for tile, cut in cuts(x):
            first, last = max(start, tile.rows.start), min(stop, tile.rows.stop)
            if first >= last:
                continue
            mine = slice(first - tile.rows.start, last - tile.rows.start)
            p = weights_of(tile, cut, norm)[:, :, mine].sum(1)
            _, k = tile.places(cut)
            total[tile.slab.batch, first - start : last - start].index_add_(-1, blocks.of(k), p)
        return total.to(lse.dtype)

    @torch.no_grad()
    def pull_summed(
        self,
        x: AttentionInputs,
        lse: Tensor,
        g: Float[Tensor, "b some_q key_blocks"],
        blocks: KeyBlocks,
        queries: tuple[int, int],
        *,
        bias: bool,
    ) -> Learned:
        start, stop = queries

        def asks(tile: RowTile, cut: Cut, p: Pairs) -> Pairs:
            if start == stop:
                return torch.zeros_like(p)
            q, k = tile.places(cut)
            inside = ((q >= start) & (q < stop))[:, None]
            rows = g[tile.slab.batch][:, (q - start).clamp(0, stop - start - 1)][..., blocks.of(k)]
            return (rows * inside).to(p.dtype)[:, None].expand_as(p)

        return of_weights(x, lse, asks, bias=bias, queries=queries)
