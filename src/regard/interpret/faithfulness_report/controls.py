"""What scores are compared with: scores that know nothing of what attention did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

SHUFFLES = 200


def positions(n: int) -> Mapping[str, Float[Tensor, "n"]]:
    """Scores by place alone: nearer to the end, nearer to the beginning, nearer to either."""
    at = torch.arange(n, dtype=torch.float64)
    return {
        "nearer tokens first": at,
        "earlier tokens first": -at,
        "both ends first": (at - (n - 1) / 2).abs(),
    }


def shuffled(scores: Sequence[Float[Tensor, "n"]], seed: int) -> list[Float[Tensor, "shuffles n"]]:
    """The scores of each text, given to its tokens at random, again and again."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.stack([one[torch.randperm(len(one), generator=draw)] for _ in range(SHUFFLES)])
        for one in scores
    ]
