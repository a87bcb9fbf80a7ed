"""Launching a kernel again, past Triton's look at every argument.

Before each launch Triton asks of every number whether it is 1 or divides by 16, and finds what it
compiled for these answers. For our kernels, with some fifty numbers each, that takes longer than a
short call takes the card. A launch with numbers that were there before, and tensors of the same
types and alignments, goes straight to what Triton chose then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from regard.backends.triton.pairs import INTERPRETED

ROOM = 4096
"""Kinds of launches that are remembered of one kernel."""


class Launched:
    """A kernel, launched as Triton's own are: `kernel[grid](*arguments, **constants)`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._names = tuple(inspect.signature(kernel.fn).parameters)
        self._known: dict[Any, tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key = (torch.cuda.current_device(), _traits(arguments), tuple(constants.items()))
        known = self._known.get(key)
        if known is not None:
            compiled, rest = known
            compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
            return
        # To multiply and add in one step is quicker and more accurate. Triton 3.10 must be asked.
        compiled = self.kernel[grid](*arguments, **constants, enable_fp_fusion=True)
        if len(self._known) >= ROOM:
            self._known.clear()
        rest = [constants[name] for name in self._names[len(arguments) :]]
        self._known[key] = compiled, rest


def launched(kernel: Any) -> Any:
    """A kernel whose launches are remembered. (Interpreted ones are run as they are.)"""
    return kernel if INTERPRETED.value else Launched(kernel)


def _traits(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that Triton may compile for. Most arguments are integers: those are not asked further."""
    return tuple([a if type(a) is int else _trait(a) for a in arguments])


def _trait(argument: Any) -> Any:
    kind = type(argument)
    if argument is None:
        return argument
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, tuple):
        return _traits(argument)
    if kind is float:
        return kind
    if kind is tl.constexpr:
        return kind, argument.value
    # A tensor as the copy engine reads it: its memory is aligned, or it could not be one.
    return kind, argument.base.dtype, tuple(argument.block_shape)
