"""Sequences of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.prefix import Prefix, checked_limit
from regard.values import Shape, readable


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Prefix):
    """Keys before each sequence's length."""

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        longest = self._longest()
        # A prefix may end past the keys; a sequence that does contradicts its own tensor.
        if longest is not None and longest > shape.K:
            raise RegardError(
                f"{self!r} counts more keys than there are",
                got=f"a length of {longest} for {shape.K} keys",
                accepted=f"lengths from 0 to {shape.K}",
            )
        return super().bind(shape, device)

    def _longest(self) -> int | None:
        if not isinstance(self.limit, Tensor):
            return self.limit
        return int(self.limit.max()) if len(self.limit) and readable(self.limit) else None


def padding(lengths: Int[Tensor, "b"] | Sequence[int]) -> Mask:
    """Keys at or beyond a sequence's length are masked: `lengths` has one number per sequence.

    A length may not be negative or exceed the keys of the call. (Lengths on a GPU are not looked
    at, which would wait for it; there a length beyond the keys masks nothing.)

    >>> print(padding([3]).draw(2, 4))
    ██████··
    ██████··
    """
    return Padding(checked_limit("padding", lengths))
