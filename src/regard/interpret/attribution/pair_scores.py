"""A number for each pair of a query and a key, head by head, made a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.interpret.attribution.probes import Slopes
from regard.traces import Trace

AT_ONCE = 2**22
"""Numbers of the largest block of rows that is held."""


class Rows(NamedTuple):
    """The scores of some queries: of each head, and of all heads together."""

    each: Float[Tensor, "b h r k"]
    together: Float[Tensor, "b r k"]

    def only(self, counted: Bool[Tensor, "b r"]) -> Rows:
        """The same, with 0 for all other queries."""
        left_out = ~counted[..., None]
        each = self.each.masked_fill(left_out[:, None], 0.0)
        return Rows(each, self.together.masked_fill(left_out, 0.0))


@dataclass(frozen=True, eq=False)
class PairScores:
    """Weights, and what they are multiplied with. By itself: the weights."""

    trace: Trace

    def rows(self, queries: Int[Tensor, "r"]) -> Rows:
        """The scores of some queries."""
        each = self._of(queries, self.trace.weights(queries=queries))
        return Rows(each, each.sum(1))

    def _of(
        self, queries: Int[Tensor, "r"], weights: Float[Tensor, "b h r k"]
    ) -> Float[Tensor, "b h r k"]:
        return weights


@dataclass(frozen=True, eq=False)
class Norms(PairScores):
    """How long what a query read from a key is, after the output projection: ‖p_ij v_j W_O‖.

    All heads together write Σ_h p_ij v_j W_O, whose length is from the products of what they would
    write with each other, H² numbers a key."""

    products: Float[Tensor, "b h i k"]

    @staticmethod
    def of(trace: Trace, output: Float[Tensor, "h e d"]) -> Norms:
        """With the output projection of the layer, head by head."""
        x = trace.inputs
        v = x.v.to(x.compute_dtype).repeat_interleave(x.group, 1)
        W = output.to(v)
        between = torch.einsum("hed,ifd->hief", W, W)
        return Norms(trace, torch.einsum("bhke,hief,bikf->bhik", v, between, v))

    def rows(self, queries: Int[Tensor, "r"]) -> Rows:
        weights = self.trace.weights(queries=queries)
        lengths = self.products.diagonal(dim1=1, dim2=2).mT.clamp_min(0).sqrt()
        p = weights.permute(0, 3, 2, 1)
        squares = ((p @ self.products.permute(0, 3, 1, 2)) * p).sum(-1).mT
        return Rows(weights * lengths[:, :, None], squares.clamp_min(0).sqrt())


@dataclass(frozen=True, eq=False)
class Relevance(PairScores):
    """A weight times the metric's derivative by it, p_ij (g_i · v_j); if `positive`, only where the
    weight speaks for the metric."""

    slopes: Slopes
    positive: bool = False

    def _of(
        self, queries: Int[Tensor, "r"], weights: Float[Tensor, "b h r k"]
    ) -> Float[Tensor, "b h r k"]:
        exact = self.trace.inputs.compute_dtype
        g, v = self.slopes.g[:, :, queries].to(exact), self.slopes.v.to(exact)
        pulls = g.unflatten(1, (v.shape[1], -1)) @ v.mT[:, :, None]
        scores: Tensor = weights * pulls.flatten(1, 2)
        return scores.clamp_min(0) if self.positive else scores


def blocks(trace: Trace, queries: Int[Tensor, "q"]) -> Iterator[Int[Tensor, "r"]]:
    """Queries, so many at a time that their rows fit."""
    B, H, _, K = trace.inputs.shape
    return iter(queries.split(max(1, AT_ONCE // max(B * H * K, 1))))
