"""What is added up over the pairs of one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

REACH = 64
"""The farthest fixed offset that is looked for, either way."""
OFFSETS = 2 * REACH + 1
"""Offsets are kept from -REACH (a later token) to REACH (an earlier one)."""


Weighed = Mapping[str, Float[Tensor, "b h"]]
"""By the name of numbers of keys: their sums over all rows, weighted by what the keys get."""


class PairTotals(NamedTuple):
    """Of each sequence and head, over the rows that are no padding."""

    received: Float[Tensor, "b h k"] | None
    """None where columns were weighed instead."""
    away: Float[Tensor, "b h"] | None
    """Weight times how many places away it falls; None unless a text looks at itself."""
    offsets: Float[Tensor, "b h offsets"]
    offset_rows: Int[Tensor, "b offsets"]
    """How many rows may see something there."""
    tokens: Float[Tensor, "b h 2"] | None
    """What falls on the same token, and on what followed it; None where no tokens are known."""
    token_rows: Int[Tensor, "b 2"] | None
    arcs: Float[Tensor, "n h 3"] | None
    sure: Bool[Tensor, ""] | None = None
    """Whether all of it holds, where that was left open; as the device has it."""
