"""The forms in which a backend's passes are called, once they are operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.passes import Pull
from regard.inputs import AttentionInputs
from regard.transforms import is_batched, transformed


@runtime_checkable
class Run(Protocol):
    """The forward pass, differentiable in q, k, v, sink, and the tensors of score and bias."""

    def __call__(self, x: AttentionInputs, *, statistics: bool) -> Rows: ...


class Way(NamedTuple):
    """How a plain call that learns nothing but q, k and v is run."""

    attended: Callable[[Tensor, Tensor, Tensor], tuple[Rows, Tensor]]
    """Its forward pass, with what the backward pass wants back."""
    backward: Callable[[AttentionInputs, Rows, Tensor, Pull], Sequence[Tensor]]
    """Its backward pass: gradients of q, k and v."""


@runtime_checkable
class Differentiable(Protocol):
    """Gradients of q, k and v that may be many at once, or be differentiated: it says that they
    cannot be. Of rows without statistics, or with them, and what the forward pass kept."""

    def __call__(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> tuple[Tensor, ...]: ...


def asks_for_more(gradients: Sequence[Tensor]) -> bool:
    """Whether gradients are given that stand for many, or while those that they lead to may be
    differentiated."""
    return torch.is_grad_enabled() or any(map(is_batched, gradients)) or transformed(gradients)


class Operators(NamedTuple):
    """A backend's passes, in the forms in which they are called."""

    run: Run
    learning: Callable[[Way, tuple[Any, ...], Tensor, Tensor, Tensor], Rows]
    """A call run in a way of its own, from all its inputs beside q, k and v, and these."""
    differentiable: Differentiable
