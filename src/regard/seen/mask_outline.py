"""How many places the rows of a call may look at: without n×n where its mask is a band, padded or
not."""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard import masks
from regard.biases.dense import Dense
from regard.inputs import AttentionInputs
from regard.masks.algebra import And, Mask, pairs
from regard.masks.keep import Keep
from regard.masks.padding import Padding
from regard.masks.tiles import band_edges, seen_keys


def open_places(x: AttentionInputs) -> Tensor:
    """How many places each row may look at, a sink being one more: broadcasts to [B, H, Q]."""
    allowed = x.mask
    if isinstance(x.bias, Dense):
        # A float mask, as large as this already.
        shown = masks.keep(x.bias.shown()).bind(x.shape, x.q.device)
        allowed = shown if allowed is None else allowed & shown
    extra = x.sink is not None
    if allowed is None:
        return torch.full((1, 1, 1), x.shape.K + extra, device=x.q.device)
    outline = outline_of(allowed)
    if outline is None:
        return seen_keys(allowed, x.shape, x.q.device) + extra
    return Span.of(outline, x).many + extra


class Outline(NamedTuple):
    """A mask that hides keys from all queries of a sequence, and of the others what is no band."""

    band: tuple[float, float]
    columns: tuple[Mask, ...] = ()


def outline_of(mask: Mask | None) -> Outline | None:
    band = (-math.inf, math.inf) if mask is None else mask.band()
    if band is not None:
        return Outline(band)
    if isinstance(mask, And):
        left, right = outline_of(mask.left), outline_of(mask.right)
        if left is None or right is None:
            return None
        both = max(left.band[0], right.band[0]), min(left.band[1], right.band[1])
        return Outline(both, left.columns + right.columns)
    # How padding is given: lengths, or which keys are real.
    table = mask.table.shape if isinstance(mask, Keep) else None
    told = isinstance(mask, Padding) or (table is not None and tuple(table[1:3]) == (1, 1))
    return Outline((-math.inf, math.inf), (mask,)) if told and mask is not None else None


class Span(NamedTuple):
    """The keys from `start` to `stop` that each query may see, but for those that are not real."""

    start: Int[Tensor, "q"]
    stop: Int[Tensor, "q"]
    real: Bool[Tensor, "b k"] | None
    many: Int[Tensor, "b one q"]
    """How many these are."""

    @staticmethod
    def of(outline: Outline, x: AttentionInputs) -> Span:
        start, stop = band_edges(outline.band, x.shape, x.q.device)
        if not outline.columns:
            return Span(start, stop, None, (stop - start)[None, None])
        keys = torch.arange(x.shape.K, device=x.q.device)
        shown = [pairs(mask, keys.new_zeros(1), keys)[:, 0, 0] for mask in outline.columns]
        real = reduce(torch.logical_and, shown)
        # Several calls with one mask are one with a larger batch.
        real = real.repeat(x.shape.B // max(len(real), 1), 1)
        before = torch.nn.functional.pad(real.long().cumsum(1), (1, 0))
        return Span(start, stop, real, (before[:, stop] - before[:, start])[:, None])
