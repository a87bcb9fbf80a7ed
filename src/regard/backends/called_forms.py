"""The forms in which a backend's passes are called, once they are operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.passes import Pull
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.transforms import is_batched, transformed


@runtime_checkable
class Run(Protocol):
    """The forward pass, differentiable in q, k, v, sink, and the tensors of score and bias."""

    def __call__(self, x: AttentionInputs, *, statistics: bool) -> Rows: ...


class Held:
    """Tensors of a call that are read again by its backward pass, past what autograd saves and
    watches over."""

    __slots__ = ("_tensors",)

    def __init__(self, x: AttentionInputs) -> None:
        values = [value for value in (x.comparison, x.mask, x.bias) if value is not None]
        # Those made for inference count no writes.
        self._tensors = [t for each in values for t in each.tensors() if not t.is_inference()]

    def versions(self) -> list[int]:
        """How often each was written to."""
        return [t._version for t in self._tensors]

    def refuse_changed(self, versions: list[int]) -> None:
        """Gradients would be those of another call."""
        if versions != self.versions():
            raise RegardError(
                "a tensor of a call was written to before its backward pass, which reads it again",
                got="an in-place change of a tensor in mask=, score= or bias=",
                do="change it after the backward pass, or make the mask of t.clone()",
            )


class Overwritten(Held):
    """The same of a call of which something was written to already, before autograd could see."""

    __slots__ = ()

    def __init__(self) -> None:
        self._tensors = []

    def refuse_changed(self, versions: list[int]) -> None:
        raise RegardError(
            "a statistic of a trace was asked for once what it is made of had been written to",
            got="an in-place change of q, k, v or the output",
            do="ask for the trace's lse or entropy before, or change a clone",
        )


class Way(NamedTuple):
    """How a plain call that learns nothing but q, k and v is run."""

    attended: Callable[[Tensor, Tensor, Tensor], tuple[Rows, Tensor]]
    """Its forward pass, with what the backward pass wants back."""
    backward: Callable[[AttentionInputs, Rows, Tensor, Pull], Sequence[Tensor]]
    """Its backward pass: gradients of q, k and v."""
    held: Held
    """What both passes read beside q, k and v."""


@runtime_checkable
class Differentiable(Protocol):
    """Gradients of q, k and v that may be many at once, or be differentiated: it says that they
    cannot be. Of rows without statistics, or with them, and what the forward pass kept."""

    def __call__(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> tuple[Tensor, ...]: ...


Learning = Callable[[Way, tuple[Any, ...], Tensor, Tensor, Tensor], Rows]
"""A call run in a way of its own, from all its inputs beside q, k and v, and these."""


def asks_for_more(gradients: Sequence[Tensor]) -> bool:
    """Whether gradients are given that stand for many, or while those that they lead to may be
    differentiated."""
    return torch.is_grad_enabled() or any(map(is_batched, gradients)) or transformed(gradients)


class Operators(NamedTuple):
    """A backend's passes, in the forms in which they are called."""

    run: Run
    learning: Learning
    differentiable: Differentiable
