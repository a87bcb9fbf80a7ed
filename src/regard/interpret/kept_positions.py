"""The tokens or keys that are kept when others are dropped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Kept(NamedTuple):
    """Scores, and the positions that are kept, in order."""

    scores: Float[Tensor, "b *g scored"]
    keep: Int[Tensor, "b *g kept"]


def strongest(
    scores: Float[Tensor, "b *g scored"],
    many: int,
    places: Int[Tensor, "scored"],
    always: Int[Tensor, "always"],
) -> Kept:
    """The `many` positions with the largest scores, and those that are always kept. Of equal scores
    the earlier position is kept: pooled votes are often equal, and `topk` promises no order."""
    best = places[scores.argsort(dim=-1, descending=True, stable=True)[..., :many]]
    keep = torch.cat([best, always.expand(*best.shape[:-1], -1)], dim=-1)
    return Kept(scores, keep.sort(dim=-1).values)
