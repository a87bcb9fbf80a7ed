"""What a bias is: a number added to the logit of each pair, found from its position."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.values import Axes, Pick, Shape, Value

LOWEST = -1e33
"""Kernels that count in units of log 2, in which the least numbers would be minus infinity, take a
finite bias below for this."""


class Bias(Value):
    """Added to the logits, after scale and soft-cap, before the mask."""

    def on(self, axes: Axes) -> Bias:
        """This bias with the axes of its tensors read as those of a caller's inputs."""
        return self

    def bind(self, shape: Shape, device: torch.device) -> Bias:
        """This bias with alignment settled and shapes checked for one call."""
        raise NotImplementedError

    def computed_in(self, dtype: torch.dtype) -> Bias:
        """This bias for logits of some type. Biases that are looked up need no change: a number is
        the same number in a wider type, where a product is not."""
        return self

    def at(self, q: Int[Tensor, "q"], k: Int[Tensor, "k"]) -> Float[Tensor, "b h q k"]:
        """The bias of some queries and keys; axes along which it is constant are 1. Bound only."""
        raise NotImplementedError

    def within(self, rows: slice, keys: slice, device: torch.device) -> Float[Tensor, "b h q k"]:
        """The bias of a run of queries and one of keys, which may be quicker to find than that of
        any: not to be written to. Bound only."""
        return self.at(*_places(rows, keys, device))

    def of_distances(self, distances: Int[Tensor, "n"]) -> Float[Tensor, "#h n"] | None:
        """The bias of pairs that are so far apart (key - query), of heads or of all of them; None
        where it depends on more. Bound only."""
        return None

    def pull_back(
        self,
        q: Int[Tensor, "q"],
        k: Int[Tensor, "k"],
        d: Float[Tensor, "b h q k"],
        into: list[Tensor],
    ) -> None:
        """Add what a gradient of these logits gives to the gradients of the bias's tensors."""
        raise NotImplementedError

    def pull_back_within(
        self, rows: slice, keys: slice, d: Float[Tensor, "b h q k"], into: list[Tensor]
    ) -> None:
        """The same for a run of queries and one of keys."""
        self.pull_back(*_places(rows, keys, d.device), d, into)

    def push_forward(
        self, q: Int[Tensor, "q"], k: Int[Tensor, "k"], moved: Bias
    ) -> Float[Tensor, "b h q k"]:
        """Tangents of what is added; `moved` is this bias with tangents as its tensors. Most
        biases are linear in them."""
        return moved.at(q, k)

    def select(self, batch: Pick, heads: Pick) -> Bias:
        """The part for some batch entries and heads. Bound only."""
        raise NotImplementedError

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        """Where the tensors of `select(batch, heads)` lie inside this bias's own. Bound only."""
        raise NotImplementedError


def _places(rows: slice, keys: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    q = torch.arange(rows.start, rows.stop, device=device)
    return q, torch.arange(keys.start, keys.stop, device=device)
