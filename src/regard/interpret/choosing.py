"""What stays when some tokens or keys are dropped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Kept(NamedTuple):
    """Scores, and the places that stay, in order."""

    scores: Float[Tensor, "b *g scored"]
    keep: Int[Tensor, "b *g kept"]


def strongest(
    scores: Float[Tensor, "b *g scored"],
    many: int,
    places: Int[Tensor, "scored"],
    always: Int[Tensor, "always"],
) -> Kept:
    """The so many places with the largest scores, and the places that stay anyway."""
    best = places[scores.topk(many, dim=-1).indices]
    keep = torch.cat([best, always.expand(*best.shape[:-1], -1)], dim=-1)
    return Kept(scores, keep.sort(dim=-1).values)
