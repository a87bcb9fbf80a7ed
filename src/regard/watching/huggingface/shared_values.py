"""Masks and biases made of tensors once in a run of a model, whose layers share them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

from regard.biases.bias import Bias
from regard.masks.algebra import Mask

V = TypeVar("V", Mask, Bias)
made_in_run: ContextVar[dict[int, tuple[Tensor, int, Any]] | None] = ContextVar(
    "made", default=None
)
"""The masks and biases that a run has made of tensors: all its layers share them."""


def once(tensor: Tensor, make: Callable[[Tensor], V]) -> V:
    """What is made of a tensor, once in a run as long as nobody writes into it."""
    made = made_in_run.get()
    if made is None or tensor.is_inference() or tensor.requires_grad:
        return make(tensor)
    held = made.get(id(tensor))
    if held is None or held[1] != tensor._version:
        held = made[id(tensor)] = tensor, tensor._version, make(tensor)
    found: V = held[2]
    return found
