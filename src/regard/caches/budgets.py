"""Which slots of a cache stay, by the score of each: as many for every key head, or where they are
worth most."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def even(
    scores: Float[Tensor, "b g s"], filled: Bool[Tensor, "b g s"], budget: int, latest: int
) -> Bool[Tensor, "b g s"]:
    """Every key head keeps `budget` slots: the `latest` last ones, and the best of the others.

    >>> scores, filled = torch.tensor([[[5.0, 1, 3, 0]]]), torch.ones(1, 1, 4, dtype=torch.bool)
    >>> even(scores, filled, 3, 1)
    tensor([[[ True, False,  True,  True]]])
    """
    return _best(_ranked(scores, filled, latest), budget) & filled


def shared(
    scores: Float[Tensor, "b g s"],
    filled: Bool[Tensor, "b g s"],
    budget: int,
    latest: int,
    floor: float,
) -> Bool[Tensor, "b g s"]:
    """The key heads share `budget` slots a head: the best of all heads stay, with `floor` of the
    budget for each.

    >>> scores, filled = torch.tensor([[[5.0, 4, 3], [1, 2, 0]]]), torch.ones(1, 2, 3).bool()
    >>> shared(scores, filled, 2, 0, 0.5)
    tensor([[[ True,  True,  True],
             [False,  True, False]]])
    """
    ranked = _ranked(scores, filled, latest)
    # Of 100 slots 0.29 are 29, where the product is a little less.
    least = int(floor * budget + 1e-9)
    ranked = torch.where(_best(ranked, least) & filled, torch.inf, ranked)
    return _best(ranked.flatten(1), scores.shape[1] * budget).view_as(filled) & filled


def _ranked(scores: Tensor, filled: Tensor, latest: int) -> Tensor:
    """Scores, above all others for the latest slots, below for those that hold nothing."""
    # What a head holds stands at the end of its slots.
    late = torch.arange(scores.shape[-1], device=scores.device) >= scores.shape[-1] - latest
    return torch.where(filled, torch.where(late, torch.inf, scores), -torch.inf)


def _best(ranked: Tensor, many: int) -> Tensor:
    """Which are the so many largest; of equals, the first. Pooled votes are often equal, and what
    stays must not depend on what else is in a batch."""
    order = ranked.argsort(dim=-1, descending=True, stable=True)[..., :many]
    return torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, order, True)
