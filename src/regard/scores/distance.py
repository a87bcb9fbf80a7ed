"""How near a key is to the query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.scores.comparison import Nearness
from regard.scores.score import Prepared, Score, positive, same_width


@dataclass(frozen=True, eq=False, repr=False)
class Distance(Score):
    bandwidth: float
    squared: bool
    _keywords = ("squared",)

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        self._refuse_scale(scale)
        same_width("distance", q, k)
        return q, k, Nearness(self.bandwidth, self.squared)


def distance(bandwidth: float = 1.0, *, squared: bool = True) -> Score:
    """Near keys weigh most: -|q - k|² / 2b², a Gaussian kernel of width b (Nadaraya-Watson).

    With `squared=False`, -|q - k| / b.

    >>> import regard, torch
    >>> k = torch.tensor([[0.0], [1.0], [2.0]])
    >>> regard.trace(torch.tensor([[0.0]]), k, k, score=distance()).weights()
    tensor([[0.5741, 0.3482, 0.0777]])
    """
    return Distance(float(positive("distance: bandwidth", bandwidth)), squared)
