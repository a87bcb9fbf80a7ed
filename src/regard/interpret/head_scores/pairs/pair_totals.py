"""What is added up over the pairs of one call."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

REACH = 64
"""The farthest fixed offset that is looked for, either way."""
OFFSETS = 2 * REACH + 1
"""Offsets are kept from -REACH (a later token) to REACH (an earlier one)."""


class PairTotals(NamedTuple):
    """Of each sequence and head, over the rows that are no padding."""

    received: Float[Tensor, "b h k"]
    away: Float[Tensor, "b h"]
    """Weight times how many places away it falls, where a text looks at itself."""
    offsets: Float[Tensor, "b h offsets"]
    offset_rows: Int[Tensor, "b offsets"]
    """How many rows may see something there."""
    tokens: Float[Tensor, "b h 2"] | None
    """What falls on the same token, and on what followed it; None where no tokens are known."""
    token_rows: Int[Tensor, "b 2"]
    arcs: Float[Tensor, "n h 3"] | None
