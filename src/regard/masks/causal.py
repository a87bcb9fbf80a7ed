"""Each query sees itself and what came before."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from regard.masks.algebra import Mask
from regard.masks.tiles import Tiles, judge_band
from regard.values import Shape, end_aligned, whole


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    offset: int | None = None
    relative = True

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        return Causal(end_aligned(self.offset, shape))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        assert self.offset is not None
        return k <= q + self.offset

    def judge(self, tiles: Tiles) -> Int8[Tensor, "1 1 t"]:
        return judge_band(tiles, *self.band())

    def band(self) -> tuple[float, float]:
        assert self.offset is not None
        return -math.inf, self.offset


def causal(offset: int | None = None) -> Mask:
    """Each query sees itself and earlier keys.

    Query i stands at position i + offset. By default the last query stands at the last key, which
    is right for decoding with a cache; `offset=0` aligns the first query with the first key.

    >>> print(causal().draw(2, 4))
    ██████··
    ████████
    >>> print(causal(offset=0).draw(2, 4))
    ██······
    ████····
    """
    return Causal(None if offset is None else whole("causal: offset", offset))
