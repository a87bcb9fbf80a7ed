"""Each query sees its neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.tiles import Tiles, judge_band
from regard.values import Shape, end_aligned, whole


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    left: int | None
    right: int | None = 0
    offset: int | None = None
    relative = True

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        return Window(self.left, self.right, end_aligned(self.offset, shape))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        assert self.offset is not None
        distance = k - q - self.offset
        low, high = _sides(self.left, self.right)
        return (distance >= low) & (distance <= high)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "1 1 t"]:
        return judge_band(tiles, *self.band())

    def band(self) -> tuple[float, float]:
        assert self.offset is not None
        low, high = _sides(self.left, self.right)
        return low + self.offset, high + self.offset

    def __repr__(self) -> str:
        right = "" if self.right == 0 else f", {self.right}"
        offset = "" if self.offset is None else f", offset={self.offset}"
        return f"window({self.left}{right}{offset})"


def _sides(left: int | None, right: int | None) -> tuple[float, float]:
    return -math.inf if left is None else -left, math.inf if right is None else right


def window(left: int | None, right: int | None = 0, *, offset: int | None = None) -> Mask:
    """Each query sees itself, `left` keys before it and `right` keys after it.

    `None` leaves a side open. The query itself is not counted: `window(2)` sees three keys.

    >>> print(window(1, 1).draw(4))
    ████····
    ██████··
    ··██████
    ····████
    """
    for name, side in (("left", left), ("right", right)):
        if side is not None and whole(f"window: {name}", side) < 0:
            raise RegardError(
                f"window: {name} counts keys besides the query itself",
                got=f"{name}={side}",
                accepted="0 or more, or None for no limit",
                do="convert other conventions with regard.masks.from_flash or from_huggingface",
            )
    given = {"left": left, "right": right, "offset": offset}
    parts = (None if n is None else whole(f"window: {name}", n) for name, n in given.items())
    return Window(*parts)
