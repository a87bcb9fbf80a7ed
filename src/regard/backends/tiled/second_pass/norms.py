"""What the weights of a row are divided by when they are asked for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.exactness import as_found, widened
from regard.backends.tiled.forward import forward
from regard.backends.tiled.second_pass.chosen_logits import chosen_logits
from regard.inputs import AttentionInputs
from regard.transforms import may_carry_tangents, may_learn

TOGETHER = 1 << 22
"""Numbers that whole rows of logits take up, at most, if one row does not take more."""


class Norm(NamedTuple):
    """A weight is exp(logit - lse - rest)."""

    lse: Float[Tensor, "b h q"]
    rest: Float[Tensor, "b h q"] | None = None
    """What rounding took from lse, where that matters."""

    def at(self, rows: slice) -> Norm:
        return Norm(self.lse[:, :, rows], None if self.rest is None else self.rest[:, :, rows])


def norm_of(x: AttentionInputs, lse: Float[Tensor, "b h q"]) -> tuple[AttentionInputs, Norm]:
    """The call to be asked, and what each of its rows is divided by."""
    wide = widened(x, lse)
    if wide is None:
        return x, Norm(lse)
    with torch.no_grad():
        rows, rest = forward(wide.map_tensors(Tensor.detach), statistics=False)
    return wide, Norm(_learned(as_found(rows.lse, lse), lse), rest)


def norm_of_rows(
    x: AttentionInputs, lse: Float[Tensor, "b h q"], queries: Int[Tensor, "some"]
) -> tuple[AttentionInputs, Norm]:
    """The same for some rows, without a look at the others."""
    own = lse[..., queries]
    wide = widened(x, lse)
    if wide is None:
        return x, Norm(own)
    B, H, _, K = x.shape
    numbers = max(B * H * K * x.comparison.scratch, 1)
    still = wide.map_tensors(Tensor.detach)
    with torch.no_grad():
        found = [_summed(still, some) for some in queries.split(max(1, TOGETHER // numbers))]
    exact, rest = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
    return wide, Norm(_learned(as_found(exact, own), own), rest)


def _summed(x: AttentionInputs, queries: Int[Tensor, "q"]) -> tuple[Tensor, Tensor]:
    """log Σ exp(logit) of some rows, and what rounding took from it."""
    terms = chosen_logits(x, queries, torch.arange(x.shape.K, device=x.q.device))
    if x.sink is not None:
        sink = x.sink.to(terms.dtype).view(-1, 1, 1)
        terms = torch.cat([terms, sink.expand(*terms.shape[:3], 1)], -1)
    top = terms.amax(-1, keepdim=True)
    nothing = top == -math.inf
    top = top.masked_fill(nothing, 0.0)
    total = (terms - top).exp().sum(-1, keepdim=True).masked_fill(nothing, 1.0).log()
    lse = top + total
    rest = (top - lse) + total
    return lse.masked_fill(nothing, -math.inf).squeeze(-1), rest.squeeze(-1)


def _learned(exact: Float[Tensor, "b h q"], lse: Float[Tensor, "b h q"]) -> Float[Tensor, "b h q"]:
    """An exact lse that is differentiated as the one of the forward pass is: in O(n)."""
    if not may_learn([lse]) and not may_carry_tangents([lse]):
        return exact
    return exact + torch.where(lse.isfinite(), lse - lse.detach(), 0.0)
