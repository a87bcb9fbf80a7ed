"""The angle between query and key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.scores.comparison import Dot
from regard.scores.score import Prepared, Score, per_head, positive, same_width


@dataclass(frozen=True, eq=False, repr=False)
class Cosine(Score):
    """cos(q, k) / temperature"""

    temperature: float | Tensor

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        self._refuse_scale(scale)
        same_width("cosine", q, k)
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
        if not isinstance(self.temperature, Tensor):
            return q, k, Dot(1 / self.temperature)
        per_head(self.temperature, 0, q.shape[1], "cosine: temperature")
        return q / self.temperature.to(q.dtype).view(-1, 1, 1), k, Dot(1.0)


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
