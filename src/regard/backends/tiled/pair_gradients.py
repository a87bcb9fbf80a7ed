"""Gradients of what logits are made of, from gradients of the logits, tile by tile."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from regard.backends.tiled.tiles import Cut, RowTile, Slab
from regard.inputs import AttentionInputs


class PairGradients:
    """Gradients of queries, keys, and the tensors of comparison and bias, added up over tiles."""

    def __init__(self, x: AttentionInputs, *, bias: bool) -> None:
        self.x = x
        dtype = x.compute_dtype
        self.comparison = [torch.zeros_like(t, dtype=dtype) for t in x.comparison.tensors()]
        biased = x.bias.tensors() if bias and x.bias is not None else []
        biased = [t for t in biased if t.is_floating_point()]
        self.bias = [torch.zeros_like(t, dtype=dtype) for t in biased]

    @cached_property
    def q(self) -> Tensor:
        return torch.zeros_like(self.x.q)

    @cached_property
    def k(self) -> Tensor:
        return torch.zeros_like(self.x.k, dtype=self.x.compute_dtype)

    def add(self, tile: RowTile, cut: Cut, ds: Tensor, slope: Tensor | None) -> Tensor:
        """Take the gradients [B, G, R, Q, K] of the logits of a cut, of which `slope` is the
        derivative of the soft-cap. What the tile's queries get of it is given back, since those of
        all its cuts are added up before they are rounded."""
        slab = tile.slab
        x = slab.x
        if not slab.finite:
            cut.fill(ds, 0.0)
        if self.bias:
            assert x.bias is not None
            x.bias.pull_back_within(tile.rows, cut.keys, ds.flatten(1, 2), self._bias_grads(slab))
        if slope is not None:
            ds = ds * slope
            if not slab.finite:
                cut.fill(ds, 0.0)
        if slab.units_finite is not None:
            given = slab.units_finite.pull_back(tile.rows, cut.keys, ds)
        else:
            k = slab.k_finite[:, :, cut.keys]
            # As the call has it: a widened one may compare in a way that is not differentiated.
            given = self.x.comparison.select(slab.heads).pull_back(tile.q_finite, k, ds)
        self.k[slab.batch, slab.key_heads, cut.keys] += given.k
        for total, part in zip(self.comparison, given.own, strict=True):
            (total[slab.heads] if total.ndim == 2 else total).add_(part)
        return given.q

    def _bias_grads(self, slab: Slab) -> list[Tensor]:
        assert self.x.bias is not None
        places = self.x.bias.pick(slab.batch, slab.heads)
        return [whole[place] for whole, place in zip(self.bias, places, strict=True)]
