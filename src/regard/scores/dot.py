"""Dot products, plain and scaled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.scores.comparison import Dot
from regard.scores.score import Prepared, Score, finite_scale, same_width


@dataclass(frozen=True, eq=False, repr=False)
class DotScore(Score):
    """q·k"""

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        same_width("dot", q, k)
        return q, k, Dot(1.0 if scale is None else finite_scale(scale))


@dataclass(frozen=True, eq=False, repr=False)
class ScaledDotScore(Score):
    """q·k / √D"""

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        same_width("scaled_dot", q, k)
        return q, k, Dot(max(q.shape[-1], 1) ** -0.5 if scale is None else finite_scale(scale))


def dot() -> Score:
    """The plain dot product, q·k (Luong)."""
    return DotScore()


def scaled_dot() -> Score:
    """The dot product over the square root of the width, q·k / √D. The default.

    With entries of variance 1, q·k has variance D; dividing by √D brings it back to 1, so that the
    softmax neither saturates nor flattens as heads grow wider.

    >>> import regard, torch
    >>> q = torch.tensor([[1.0, 0, 1, 0]])
    >>> k = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]])
    >>> regard.trace(q, k, k).weights()
    tensor([[0.2741, 0.2741, 0.4519]])
    """
    return ScaledDotScore()
