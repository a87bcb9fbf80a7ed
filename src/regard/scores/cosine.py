"""The angle between query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.scores.comparison import Dot
from regard.scores.score import Prepared, Score, apart, per_head, positive, same_width


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Score):
    """cos(q, k) / temperature"""

    temperature: float | Tensor

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        self._refuse_scale(scale)
        same_width("cosine", q, k)
        q, k = _direction(q), _direction(k)
        if not isinstance(self.temperature, Tensor):
            return q, k, Dot(1 / self.temperature)
        per_head(self.temperature, 0, q.shape[1], "cosine: temperature")
        return q / self.temperature.to(q.dtype).view(-1, 1, 1), k, Dot(1.0)


def _direction(x: Tensor) -> Tensor:
    """A vector of length 1. Half precision knows neither the length of a large vector nor a number
    to keep that of a small one from 0."""
    broken, x = apart(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = torch.nn.functional.normalize(wide, dim=-1).to(x.dtype)
    return unit.masked_fill(broken, math.nan)


def cosine(temperature: float | Float[Tensor, "*h"] = 1.0) -> Score:
    """The cosine of the angle between query and key, over a temperature (a number, or learned).

    >>> import regard, torch
    >>> k = torch.tensor([[1.0, 0], [0, 5]])
    >>> regard.trace(k[:1] * 100, k, k, score=cosine(0.5)).weights()
    tensor([[0.8808, 0.1192]])
    """
    if not isinstance(temperature, Tensor):
        positive("cosine: temperature", temperature)
    return Cosine(temperature)
