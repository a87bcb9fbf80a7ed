"""Functions of batch, head, query and key, as FlexAttention takes them: what they depend on, and
their values for all pairs, some queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx

from regard.pair_programs import Function, graph_of, mapped, places
from regard.values import Shape

PIECE = 1 << 22
"""Pairs that are evaluated at a time."""


class Piece(NamedTuple):
    """The values of some queries with all keys: [B or 1, H or 1, q, K]."""

    q: Tensor
    values: Tensor


class PairFunction:
    """A function of four places, over the pairs of one call.

    >>> def distance(b, h, q, k): return k - q
    >>> values = PairFunction(distance, Shape(2, 8, 3, 3), torch.device("cpu"))
    >>> values.batch, values.heads, values.whole().shape
    (1, 1, torch.Size([1, 1, 3, 3]))
    """

    def __init__(self, function: Function, shape: Shape, device: torch.device) -> None:
        self.function, self.shape, self.device = function, shape, device
        used = _used(graph_of(function, *places(device)))
        self.batch, self.heads = (n if u else 1 for n, u in zip(shape[:2], used[:2], strict=True))

    @property
    def pairs(self) -> int:
        """How many values there are: axes that do not matter count once."""
        return self.batch * self.heads * self.shape.Q * self.shape.K

    def pieces(self) -> Iterator[Piece]:
        b, h, q, k = (
            torch.arange(n, device=self.device) for n in (self.batch, self.heads, *self.shape[2:])
        )
        rows = max(1, PIECE * self.shape.Q // max(self.pairs, 1))
        for some in q.split(rows):
            yield Piece(some, every(self.function, (b, h, some, k)))

    def whole(self) -> Tensor:
        """Every value: the n×n tensor."""
        return torch.cat([piece.values for piece in self.pieces()], 2)


def every(function: Function, given: tuple[Tensor, ...]) -> Tensor:
    """A function of numbers, for all combinations of what is given for each."""
    axes = len(given)
    return mapped(function, tuple(t.view(-1, *(1,) * (axes - 1 - i)) for i, t in enumerate(given)))


def _used(graph: fx.Graph) -> list[bool]:
    return [bool(node.users) for node in graph.nodes if node.op == "placeholder"]
