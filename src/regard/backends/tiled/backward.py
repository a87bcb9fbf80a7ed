"""The backward pass: weights are computed again from q, k and lse, tile by tile.

With p = exp(s - lse - lse_rest), E = lse - entropy (the expected logit) and gradients g of out,
lse and entropy,

    ∂/∂s = p · (g_out·v - g_out·out + g_lse - g_entropy (s - E)).

The expected value of g_out·v under p is g_out·out, which is why no second sum is needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.backends.poison import all_finite
from regard.backends.tiled.columns import columns
from regard.backends.tiled.fused import Passed, fusing, pull
from regard.backends.tiled.pair_gradients import PairGradients
from regard.backends.tiled.tiles import Cut, RowTile, Slab, slabs
from regard.inputs import AttentionInputs


class Backward:
    """Gradients of every differentiable input of a call."""

    def __init__(
        self,
        x: AttentionInputs,
        passed: Passed,
        g_out: Tensor | None,
        g_lse: Tensor | None,
        g_entropy: Tensor | None,
        *,
        bias: bool,
    ) -> None:
        self.x = x
        self.rows, self.lse_rest = rows, _ = passed
        dtype = x.compute_dtype
        self.g_out = None if g_out is None else g_out.to(dtype)
        self.g_entropy = g_entropy
        # What every weight of a row is shifted by, and the expected logit.
        self.shift = torch.zeros_like(rows.lse) if g_lse is None else g_lse.to(dtype).clone()
        if self.g_out is not None:
            self.shift -= (self.g_out * rows.out.to(dtype)).sum(-1)
        self.expected = rows.lse - rows.entropy if g_entropy is not None else None
        self.q: Tensor
        self.k: Tensor
        self.v: Tensor
        self.sink = None if x.sink is None else torch.zeros_like(x.sink, dtype=dtype)
        self.pairs = PairGradients(x, bias=bias)
        self.comparison, self.bias = self.pairs.comparison, self.pairs.bias

    def run(self) -> Backward:
        """Go over the tiles; the gradients are then in q, k, v, sink, comparison and bias."""
        x = self.x
        is_finite = x.mask is None or all_finite(x.q, x.k, x.v)
        loop = fusing(x) if is_finite else None
        if loop is None:
            self._by_tiles(is_finite)
        else:
            g_out = (
                torch.zeros_like(self.rows.out, dtype=torch.float32)
                if self.g_out is None
                else self.g_out
            )
            passed = Passed(self.rows, self.lse_rest)
            self.q, self.k, self.v = pull(x, loop, passed, g_out, self.shift, self.g_entropy)
        if self.sink is not None:
            self._add_sink()
        return self

    def _by_tiles(self, is_finite: bool) -> None:
        self.q, self.k = self.pairs.q, self.pairs.k
        self.v = torch.zeros_like(self.x.v, dtype=self.x.compute_dtype)
        for slab in slabs(self.x, is_finite=is_finite):
            for tile in slab.row_tiles():
                self._add_tile(slab, tile)

    def _add_tile(self, slab: Slab, tile: RowTile) -> None:
        # A row that sees nothing has lse = -inf and only -inf logits; any finite number will do.
        lse = tile.take(self.rows.lse)
        lse = torch.where(lse.isinf(), 0.0, lse)[..., None]
        lse_rest = tile.take(self.lse_rest)[..., None]
        shift = tile.take(self.shift)[..., None]
        g_out = None if self.g_out is None else tile.take(self.g_out).flatten(2, 3)
        dq = torch.zeros_like(tile.q)
        for cut in tile.cuts:
            s, slope = tile.logits_and_slope(cut)
            p = (s - lse).sub_(lse_rest).exp_()
            here = (slab.batch, slab.key_heads, cut.keys)
            ds = shift.expand_as(p)
            if g_out is not None:
                dropped, dp = self._through_values(tile, cut, p, g_out)
                self.v[here] += torch.matmul(dropped.flatten(2, 3).mT, g_out)
                ds = dp + ds
            if self.g_entropy is not None:
                assert self.expected is not None
                away = (s - tile.take(self.expected)[..., None]).masked_fill_(p == 0, 0.0)
                ds = ds - tile.take(self.g_entropy)[..., None] * away
            dq += self.pairs.add(tile, cut, p * ds, slope)
        tile.put(self.q, dq.to(self.q.dtype))

    def _through_values(
        self, tile: RowTile, cut: Cut, p: Tensor, g_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights as they met the values, and the gradient of the weights."""
        slab = tile.slab
        values = columns(slab.v_finite[:, :, cut.keys], g_out.shape[-2])
        dp = torch.matmul(g_out, values).view(p.shape)
        if not slab.x.dropout:
            return p, dp
        keeps = tile.keeps(cut).to(p.dtype).div_(1 - slab.x.dropout)
        return p * keeps, dp * keeps

    def _add_sink(self) -> None:
        assert self.sink is not None
        assert self.x.sink is not None
        sink = self.x.sink.to(self.sink.dtype)[:, None]
        p = torch.exp(sink - self.rows.lse - self.lse_rest)
        ds = self.shift
        if self.g_entropy is not None:
            assert self.expected is not None
            ds = ds - self.g_entropy * (sink - self.expected)
        # A sink of minus infinity is none.
        self.sink += (p * ds).masked_fill(sink == -math.inf, 0.0).sum((0, 2))
