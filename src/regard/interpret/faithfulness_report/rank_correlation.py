"""Rank correlation, and how far it depends on which tokens or texts happened to be there."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

RESAMPLES = 2000


class Interval(NamedTuple):
    """A value, and the interval that holds 95 % of those of resampled tokens or texts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.2f}"
        return f"{self.value:.2f}, 95 % interval {self.low:.2f} to {self.high:.2f}"


def ranks(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """The rank of each number, from 1; equal ones share the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([3.5000, 1.0000, 3.5000, 2.0000], dtype=torch.float64)
    """
    x = x.double().contiguous()
    order = x.sort(-1).values
    below = torch.searchsorted(order, x, right=False)
    up_to = torch.searchsorted(order, x, right=True)
    return (below + up_to + 1).double() / 2


def spearman(score: Float[Tensor, "*b n"], effect: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """The correlation of ranks. It is 0 if all scores are equal, as they predict nothing, and NaN
    if all effects are.

    >>> x = torch.arange(5.0)
    >>> pairs = (x, -x.exp()), (torch.ones(5), x), (x, torch.ones(5))
    >>> [round(float(spearman(*pair)), 6) for pair in pairs]
    [-1.0, 0.0, nan]
    """
    a, b = (ranks(t) for t in (score, effect))
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    lengths = a.norm(dim=-1), b.norm(dim=-1)
    found: Tensor = (a * b).sum(-1) / (lengths[0].clamp_min(1e-9) * lengths[1])
    return found


def top_share(score: Float[Tensor, "n"], effect: Float[Tensor, "n"], part: float = 0.2) -> float:
    """The share of all effect that is on the tokens with the largest scores, a fifth of them. Those
    that are equal at the edge share what is left, so that equal scores give the share itself.

    >>> top_share(torch.ones(10), torch.arange(10.0))
    0.2
    """
    size, total = part * len(score), float(effect.sum())
    if not total:
        return math.nan
    found, left = 0.0, size
    for value in score.unique().flip(0):
        same = effect[score == value]
        taken = min(1.0, left / len(same))
        found += taken * float(same.sum())
        left -= taken * len(same)
        if left <= 1e-9:
            break
    return found / total


def over_texts(each: Float[Tensor, "m t"], seed: int) -> list[Interval]:
    """The means of some numbers of each text, with intervals over texts."""
    known = each[:, ~each.isnan().any(0)]
    if not known.shape[1]:
        return [Interval(math.nan, math.nan, math.nan)] * len(each)
    drawn = _drawn(known.shape[1], seed)
    return [_interval(float(row.mean()), row[drawn].mean(-1)) for row in known]


def over_tokens(
    scores: Float[Tensor, "m n"], effect: Float[Tensor, "n"], seed: int
) -> tuple[list[Interval], Float[Tensor, "m r"]]:
    """The rank correlations of scores with effects, with intervals over tokens; and those of the
    resampled tokens themselves."""
    drawn = _drawn(effect.shape[0], seed)
    again = torch.stack([spearman(row[drawn], effect[drawn]) for row in scores])
    values = spearman(scores, effect.expand_as(scores))
    found = [_interval(float(v), row) for v, row in zip(values, again, strict=True)]
    return found, again


def between(values: Float[Tensor, "r"], value: float) -> Interval:
    """A value with the interval of those that were drawn."""
    return _interval(value, values)


def _drawn(n: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(n, (RESAMPLES if n > 1 else 1, n), generator=draw)


def _interval(value: float, drawn: Float[Tensor, "r"]) -> Interval:
    known = drawn[~drawn.isnan()].double()
    if len(known) < 2:
        return Interval(value, math.nan, math.nan)
    low, high = known.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(value, low, high)
