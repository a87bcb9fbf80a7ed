"""Counting True entries in any rectangle of a table of booleans, in four look-ups."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.masks.tiles.states import states


class AreaTable:
    """Sums over every rectangle that starts at the origin."""

    def __init__(self, table: Bool[Tensor, "b h rows columns"]) -> None:
        sums = table.to(torch.int64).cumsum(-1).cumsum(-2)
        self.sums = torch.nn.functional.pad(sums, (1, 0, 1, 0))

    def judge(
        self, r0: Int[Tensor, "t"], r1: Int[Tensor, "t"], c0: Int[Tensor, "t"], c1: Int[Tensor, "t"]
    ) -> Int8[Tensor, "b h t"]:
        """Whether all or none of the entries of each rectangle are True."""
        s = self.sums
        inside = s[..., r1, c1] - s[..., r0, c1] - s[..., r1, c0] + s[..., r0, c0]
        return states(full=inside == (r1 - r0) * (c1 - c0), empty=inside == 0)
