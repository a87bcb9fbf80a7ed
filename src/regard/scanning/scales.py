"""Histograms with fixed bins: counts that are added up in any order, and give quantiles to within
a bin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

BINS = 256


@dataclass(frozen=True)
class Scale:
    """The axis of a histogram: from `low` to `high`, in bins that are alike on it.

    `bend` is linear, log1p (for counts), or asinh: like a logarithm far from 0, on both sides, and
    linear near it. What lies outside counts in the bin at the end.

    >>> Scale(0.0, 1.0).width_at(0.5)
    0.00390625
    """

    low: float
    high: float
    bend: str = "linear"
    unit: float = 1.0
    """The size from which on an axis bends."""

    def _bent(self, x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        x = x / self.unit
        if self.bend == "linear":
            return x
        return x.log1p() if self.bend == "log1p" else x.asinh()

    def _straight(self, x: float) -> float:
        return {"linear": float, "log1p": math.expm1, "asinh": math.sinh}[self.bend](x) * self.unit

    @property
    def _ends(self) -> tuple[float, float]:
        low, high = self._bent(torch.tensor([self.low, self.high], dtype=torch.float64)).tolist()
        return low, high

    def bins(self, values: Float[Tensor, "*s"]) -> Int[Tensor, "*s"]:
        """In which bin each value lies."""
        low, high = self._ends
        place = (self._bent(values.double()) - low) * (BINS / (high - low))
        return place.floor().clamp(0, BINS - 1).nan_to_num(0.0).long()

    def edge(self, place: float) -> float:
        """The value at a place on the axis, in bins from its beginning."""
        low, high = self._ends
        return float(self._straight(low + (high - low) * place / BINS))

    def width_at(self, value: float) -> float:
        """How wide the bin is that a value lies in: what a quantile there may be off by."""
        found = int(self.bins(torch.tensor(value, dtype=torch.float64)))
        return self.edge(found + 1) - self.edge(found)

    def quantile(self, counts: list[int], share: float) -> float:
        """The value below which a share of everything lies, as if each bin were evenly filled."""
        total, before = sum(counts), 0
        if not total:
            return math.nan
        for place, many in enumerate(counts):
            if many and before + many >= share * total:
                return self.edge(place + max(0.0, share * total - before) / many)
            before += many
        raise AssertionError("shares are at most 1")


SCALES = {
    "entropy": Scale(0.0, 16.0),
    "max_logit": Scale(-1e5, 1e5, "asinh"),
    "first": Scale(0.0, 1.0),
    "distance": Scale(0.0, 2.0**20, "log1p"),
    "norm": Scale(0.0, 1e5, "log1p", 1e-3),
}
"""By the name of a statistic."""
