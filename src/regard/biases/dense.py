"""Any bias at all, as a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.arguments import refuse_no_tensor
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.values import Axes, Pick, Shape, broadcasts

NOTHING = -1e4
"""A float mask often holds a large negative number in place of minus infinity, whose weight is 0
all the same: a bias that takes away so much, or more, is no logit that anybody means."""


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Bias):
    tensor: Tensor

    def on(self, axes: Axes) -> Bias:
        return Dense(axes.fold(self.tensor, "bias"))

    def bind(self, shape: Shape, device: torch.device) -> Bias:
        if self.tensor.ndim != 4:
            raise RegardError(
                "the axes of this bias could mean several things",
                got=f"{list(self.tensor.shape)}",
                accepted="[Q, K], or [B, H, Q, K] with 1 where an axis does not matter; [B, Q, K] "
                "for inputs [B, N, D]",
                do="[B, Q, K] is t[:, None]; [H, Q, K] is t[None]",
            )
        fits = zip(self.tensor.shape, shape, strict=True)
        if not all(broadcasts(have, need) for have, need in fits):
            raise RegardError(
                "dense: the bias does not fit the call",
                got=f"{list(self.tensor.shape)} for [B, H, Q, K] = {list(shape)}",
                accepted="each axis the call's length, or 1",
            )
        return self

    def at(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h q k"]:
        return self.tensor[(slice(None), slice(None), *self._places(q, k))]

    def within(self, rows: slice, keys: slice, device: torch.device) -> Float[Tensor, "b h q k"]:
        return self.tensor[(slice(None), slice(None), *self._runs(rows, keys))]

    def shown(self) -> Bool[Tensor, "#b #h #q #k"]:
        """Which pairs it leaves open, as who counts them means it."""
        return ~(self.tensor <= NOTHING)

    def shows(self, q: Tensor, k: Tensor) -> Bool[Tensor, "#b #h #q #k"]:
        """Which of some pairs it leaves open."""
        return ~(self.at(q, k) <= NOTHING)

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor, into: list[Tensor]) -> None:
        into[0][(slice(None), slice(None), *self._places(q, k))] += self._shared(d)

    def pull_back_within(self, rows: slice, keys: slice, d: Tensor, into: list[Tensor]) -> None:
        into[0][(slice(None), slice(None), *self._runs(rows, keys))].add_(self._shared(d))

    def select(self, batch: Pick, heads: Pick) -> Bias:
        tensor = self.tensor if self.tensor.shape[0] == 1 else self.tensor[batch]
        return Dense(tensor if tensor.shape[1] == 1 else tensor[:, heads])

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        whole = slice(None)
        n = self.tensor.shape
        return [(whole if n[0] == 1 else batch, whole if n[1] == 1 else heads)]

    def _shared(self, d: Tensor) -> Tensor:
        """Gradients of pairs, added up along the axes that they share numbers on."""
        axes = [axis for axis, n in enumerate(self.tensor.shape) if n == 1]
        return d.sum(axes, keepdim=True) if axes else d

    def _runs(self, rows: slice, keys: slice) -> tuple[slice, slice]:
        n = self.tensor.shape
        return rows if n[2] > 1 else slice(None), keys if n[3] > 1 else slice(None)

    def _places(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        n = self.tensor.shape
        q = q if n[2] > 1 else torch.zeros_like(q[:1])
        return q[:, None], k if n[3] > 1 else torch.zeros_like(k[:1])


def dense(tensor: Float[Tensor, "*bh q k"]) -> Bias:
    """Any tensor that broadcasts to [B, H, Q, K]; [Q, K] is the same for every batch and head. For
    inputs with other axes than [B, H, N, D], those in place of B and H: for one head, [B, Q, K].

    Minus infinity masks a pair, as a float mask does elsewhere. A large negative number does so as
    long as the query may look elsewhere; a row of nothing else gives all its keys the same weight.

    >>> import regard, torch
    >>> x = torch.zeros(2, 4)
    >>> regard.trace(x, x, x, bias=dense(torch.tensor([[0.0, 1], [2, 0]]))).weights()
    tensor([[0.2689, 0.7311],
            [0.8808, 0.1192]])
    """
    refuse_no_tensor("dense: the bias", tensor, "a floating-point tensor [Q, K] or [B, H, Q, K]")
    if not tensor.is_floating_point() or tensor.ndim < 2:
        raise RegardError(
            "dense: numbers to add to the logits",
            got=f"{tensor.dtype} {list(tensor.shape)}",
            accepted="a floating-point tensor [Q, K] or [B, H, Q, K] (any axis 1)",
            do="for booleans use masks.keep(t) or masks.ignore(t)",
        )
    if type(tensor).__module__ == "torch.nn.attention.bias":
        # It stands for a mask, and its memory holds nothing.
        raise RegardError(
            "dense: numbers to add to the logits",
            got=f"a {type(tensor).__name__}, which says what is masked and holds no numbers",
            do="mask=masks.from_sdpa(t)",
        )
    return Dense(tensor[None, None] if tensor.ndim == 2 else tensor)
