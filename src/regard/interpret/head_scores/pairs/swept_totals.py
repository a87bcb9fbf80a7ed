"""The totals of a call, added up from blocks of its weights."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.passes import no_autocast
from regard.interpret.head_scores.pairs.pair_totals import OFFSETS, REACH, PairTotals
from regard.interpret.head_scores.pairs.weight_blocks import Block, distances, open_pairs
from regard.interpret.head_scores.texts.sides import Sides
from regard.traces import Trace


class Sweep:
    """Sums that grow block by block."""

    def __init__(self, trace: Trace, sides: Sides, arcs: Int[Tensor, "n 3"] | None) -> None:
        x = self.x = trace.inputs
        self.sides, self.arcs = sides, arcs
        B, H, _, K = x.shape
        zeros = trace.rows.lse.new_zeros
        self.received = zeros(B, H, K, dtype=torch.float64)
        self.away = zeros(B, H, dtype=torch.float64)
        self.offset_sums = zeros(B, H, OFFSETS, dtype=torch.float64)
        self.offset_rows = zeros(B, OFFSETS, dtype=torch.long)
        told = sides.query.ids is not None and sides.key.ids is not None
        self.token_sums = zeros(B, H, 2, dtype=torch.float64) if told else None
        self.token_rows = zeros(B, 2, dtype=torch.long)
        self.arc_weights = None if arcs is None else zeros(len(arcs), H, 3)

    def totals(self) -> PairTotals:
        return PairTotals(
            self.received,
            self.away,
            self.offset_sums,
            self.offset_rows,
            self.token_sums,
            self.token_rows,
            self.arc_weights,
        )

    def add(self, block: Block) -> None:
        q, k, w = block
        if self.sides.query.padded:
            w = w * self.sides.query.real[:, None, q, None]
        self.received[..., k[0] : k[-1] + 1] += w.sum(-2)
        seen = open_pairs(self.x, q, k)[:, 0] & self.sides.query.real[:, q, None]
        if self.sides.key.padded:
            # Some models hide padding by a bias, of which the mask knows nothing.
            seen = seen & self.sides.key.real[:, None, k]
        kinds = []
        if self.token_sums is not None:
            same, after = self._tokens(q, k)
            kinds = [same & seen, after & seen]
            self.token_rows += torch.stack([kind.any(-1).sum(-1) for kind in kinds], -1)
        # One product reads the weights once, for every head and kind of pair.
        by_kind = torch.stack([kind.to(w.dtype) for kind in kinds], -1) if kinds else None
        if self.sides.own:
            away = distances(self.x, block)[None, ..., None].expand(len(w), -1, -1, -1)
            by_kind = away if by_kind is None else torch.cat([by_kind, away], -1)
            self._offsets(q, k, w, seen)
        if by_kind is not None:
            with no_autocast(w):
                summed = (w.flatten(2) @ by_kind.flatten(1, 2)).double()
            if self.token_sums is not None:
                self.token_sums += summed[..., :2]
            if self.sides.own:
                self.away += summed[..., -1]
        if self.arcs is not None:
            self._arcs(q, k, w, seen)

    def _tokens(
        self, q: Int[Tensor, "q"], k: Int[Tensor, "k"]
    ) -> tuple[Bool[Tensor, "b q k"], Bool[Tensor, "b q k"]]:
        """Pairs of the same token, and those whose key follows a copy of the query's token."""
        asks = self.sides.query.ids
        assert asks is not None
        token = asks[:, q, None]
        same, after = (token == kind[:, None, k] for kind in self.sides.key.kinds)
        if self.sides.own:
            earlier = k < q[:, None] + (self.x.shape.K - self.x.shape.Q)
            same, after = same & earlier, after & earlier
        return same, after

    def _offsets(
        self,
        q: Int[Tensor, "q"],
        k: Int[Tensor, "k"],
        w: Float[Tensor, "b h q k"],
        seen: Bool[Tensor, "b q k"],
    ) -> None:
        # The first key, of those that are there, at the farthest offset of the first query.
        first = int(q[0]) + self.x.shape.K - self.x.shape.Q - REACH - int(k[0])
        self.offset_rows += by_offset(seen, first).sum(-2)
        self.offset_sums += by_offset(w, first).sum(-2, dtype=torch.float64)

    def _arcs(
        self,
        q: Int[Tensor, "q"],
        k: Int[Tensor, "k"],
        w: Float[Tensor, "b h q k"],
        seen: Bool[Tensor, "b q k"],
    ) -> None:
        assert self.arcs is not None
        assert self.arc_weights is not None
        entry, query, key = self.arcs.unbind(1)
        inside = (query >= q[0]) & (query <= q[-1]) & (key >= k[0]) & (key <= k[-1])
        at = inside.nonzero()[:, 0]
        b, i, j = entry[at], query[at] - q[0], key[at] - k[0]
        mine, most = w[b, :, i, j], w.amax(-1)[b, :, i]
        shown = seen[b, i, j][:, None].expand_as(mine)
        hit = (mine >= most) & shown
        self.arc_weights[at] = torch.stack([mine, hit.to(w.dtype), shown.to(w.dtype)], -1)


def by_offset(pairs: Shaped[Tensor, "*lead q k"], first: int) -> Shaped[Tensor, "*lead q offsets"]:
    """What each query has at each offset, the farthest later key first. Offset REACH of the first
    query is column `first`, of the next query the column after it; 0 where there is none."""
    rows = pairs.shape[-2]
    width = rows + OFFSETS - 1
    near = pairs[..., max(first, 0) : max(first + width, 0)]
    left = min(max(-first, 0), width)
    near = pad(near, (left, width - left - near.shape[-1])).contiguous()
    # Row i begins at column i: one column further on with each row.
    strides = near.stride()
    slanted = near.as_strided(
        (*near.shape[:-1], OFFSETS), (*strides[:-2], strides[-2] + 1, strides[-1])
    )
    return slanted.flip(-1)
