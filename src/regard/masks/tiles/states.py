"""The state of a tile: whether a mask allows none, some or all of its pairs.

With EMPTY < PARTIAL < FULL, `&` is the smaller state, `|` the larger and `~` the mirror, so
combinations need no case analysis. A PARTIAL that comes out of two PARTIALs may really be empty or
full; a single pair is never PARTIAL, which is what makes counting by subdivision exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2


class Tiles(NamedTuple):
    """Rectangles of queries [q0, q1) and keys [k0, k1), one of each per tile."""

    q0: Int[Tensor, "t"]
    q1: Int[Tensor, "t"]
    k0: Int[Tensor, "t"]
    k1: Int[Tensor, "t"]


def judge_band(tiles: Tiles, low: float, high: float) -> Int8[Tensor, "1 1 t"]:
    """A tile holds every k - q between its two far corners, so two comparisons settle it."""
    least, most = tiles.k0 - tiles.q1 + 1, tiles.k1 - 1 - tiles.q0
    empty = (most < low) | (least > high) | (low > high)
    return states(full=(least >= low) & (most <= high), empty=empty)


def states(full: Bool[Tensor, "..."], empty: Bool[Tensor, "..."]) -> Int8[Tensor, "b h t"]:
    """Tile states from two facts, as [b, h, t]."""
    state = 1 + full.to(torch.int8) - empty.to(torch.int8)
    while state.ndim < 3:
        state = state.unsqueeze(0)
    return state
