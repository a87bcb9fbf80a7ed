"""Memory of calls that come again: tensors for what they give, and room that is used once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SPARE = 1 << 21
"""Bytes of room that are kept from call to call, once for each thread that makes calls at once."""

_GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_CPU = torch.device("cpu")


def _through_the_dispatcher(
    size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=_CPU)


empty = getattr(_GUARDS, "_empty_strided_cpu", _through_the_dispatcher)
"""An empty tensor on the CPU, of a size, strides and type. PyTorch's own compiled programs make
theirs like this, in a third of the time; the function is private to it."""


class Room:
    """Memory that a call has for itself until it is over."""

    __slots__ = ("_held", "address")

    def __init__(self, size: int) -> None:
        self._held = empty((size,), (1,), torch.uint8)
        self.address = self._held.data_ptr()


_spare: list[Room] = []


def borrow(size: int) -> Room:
    """Room of that many bytes or more."""
    if size > SPARE:
        return Room(size)
    try:
        return _spare.pop()
    except IndexError:
        return Room(SPARE)


def give_back(room: Room, size: int) -> None:
    """After a call that borrowed room of that size. What is not given back is not used again."""
    if size <= SPARE:
        _spare.append(room)
