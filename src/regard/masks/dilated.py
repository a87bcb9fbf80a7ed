"""Every step-th key, counted from the query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.tiles import Tiles, states
from regard.values import Shape, end_aligned, whole


@dataclass(frozen=True, eq=False, repr=False)
class Dilated(Mask):
    step: int
    offset: int | None = None
    relative = True

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        return Dilated(self.step, end_aligned(self.offset, shape))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        assert self.offset is not None
        return (k - q - self.offset) % self.step == 0

    def judge(self, tiles: Tiles) -> Int8[Tensor, "1 1 t"]:
        assert self.offset is not None
        least = tiles.k0 - tiles.q1 + 1 - self.offset
        most = tiles.k1 - 1 - tiles.q0 - self.offset
        hit = torch.div(most, self.step, rounding_mode="floor") * self.step >= least
        return states(full=hit & ((least == most) | (self.step == 1)), empty=~hit)


def dilated(step: int, *, offset: int | None = None) -> Mask:
    """Each query sees itself and every `step`-th key before and after it.

    >>> from regard.masks import window
    >>> print((window(4) & dilated(2)).draw(6))
    ██··········
    ··██········
    ██··██······
    ··██··██····
    ██··██··██··
    ··██··██··██
    """
    if whole("dilated: step", step) < 1:
        raise RegardError("dilated takes a step between keys", got=str(step), accepted="1 or more")
    shift = None if offset is None else whole("dilated: offset", offset)
    return Dilated(whole("dilated: step", step), shift)
