"""Masks combined where one of them may hide nothing: what hides nothing leaves no trace in them."""

from __future__ import annotations

from regard import masks
from regard.masks.algebra import Mask

EVERYTHING = masks.window(None, None)
"""Every pair may be seen."""


def both(a: Mask, b: Mask) -> Mask:
    return b if a == EVERYTHING else a if b == EVERYTHING else a & b


def either(a: Mask, b: Mask) -> Mask:
    return EVERYTHING if EVERYTHING in (a, b) else a | b
