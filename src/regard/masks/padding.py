"""Sequences of different lengths in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from regard.masks.algebra import Mask
from regard.masks.prefix import Prefix, checked_limit


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Prefix):
    """Keys before each sequence's length."""


def padding(lengths: Int[Tensor, "b"] | Sequence[int]) -> Mask:
    """Keys at or beyond a sequence's length are hidden: `lengths` has one number per sequence.

    >>> print(padding([3]).draw(2, 4))
    ██████··
    ██████··
    """
    return Padding(checked_limit("padding", lengths))
