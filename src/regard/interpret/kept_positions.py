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
    """The so many places with the largest scores, of equals the first, and the places that stay
    anyway. Pooled votes are often equal, and `topk` promises no order: a cache that chooses by them
    keeps the earlier token."""
    best = places[scores.argsort(dim=-1, descending=True, stable=True)[..., :many]]
    keep = torch.cat([best, always.expand(*best.shape[:-1], -1)], dim=-1)
    return Kept(scores, keep.sort(dim=-1).values)
