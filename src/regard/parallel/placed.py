"""Masks and biases of a whole sequence, for queries that stand at some of its places.

A rank that has some queries and all keys counts its queries from 0; the mask and the bias, which
were bound to the whole call, count them where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int8
from torch import Tensor

from regard.biases.alibi import Alibi
from regard.biases.bias import Bias
from regard.biases.dense import Dense
from regard.biases.relative import Relative
from regard.masks.algebra import And, Mask, Not, Or
from regard.masks.keep import Keep
from regard.masks.prefix import Prefix
from regard.masks.spans import Spans
from regard.masks.tiles import Tiles
from regard.values import Pick, Shape

Rule = TypeVar("Rule", Mask, Bias)


@dataclass(frozen=True, eq=False, repr=False)
class PlacedMask(Mask):
    """A bound mask for queries at some places, which rise. Where they are a run, `start` is the
    first of them."""

    mask: Mask
    places: Tensor
    length: int
    """How many queries the whole call has."""
    start: int | None

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        return self.mask.allows(b, h, self.places[q], k)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        # What holds for all queries between the first and the last of a tile holds for the tile.
        first, last = self.places[tiles.q0], self.places[tiles.q1 - 1]
        return self.mask.judge(Tiles(first, last + 1, tiles.k0, tiles.k1))

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        return self._of(self.mask.spans(shape._replace(Q=self.length), device))

    def spans_of_rest(self, shape: Shape, device: torch.device) -> Spans | None:
        return self._of(self.mask.spans_of_rest(shape._replace(Q=self.length), device))

    def _of(self, found: Spans | None) -> Spans | None:
        if found is None:
            return None
        first, stop = (edge.expand(*edge.shape[:2], self.length) for edge in found[:2])
        places = self.places.to(first.device)
        return Spans(first[..., places], stop[..., places], found.sure)

    def band(self) -> tuple[float, float] | None:
        band = self.mask.band()
        if band is None or self.start is None:
            return None
        return band[0] + self.start, band[1] + self.start

    def select(self, batch: Pick, heads: Pick) -> Mask:
        return replace(self, mask=self.mask.select(batch, heads))

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.mask.batch

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self.mask.heads

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.start is not None and self.mask.relative

    def __repr__(self) -> str:
        return f"{self.mask!r} of {len(self.places)} queries"


@dataclass(frozen=True, eq=False, repr=False)
class PlacedBias(Bias):
    """A bound bias for queries at some places."""

    bias: Bias
    places: Tensor

    def at(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h q k"]:
        return self.bias.at(self.places[q], k)

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor, into: list[Tensor]) -> None:
        self.bias.pull_back(self.places[q], k, d, into)

    def push_forward(self, q: Tensor, k: Tensor, moved: Bias) -> Float[Tensor, "b h q k"]:
        assert isinstance(moved, PlacedBias)
        return self.bias.push_forward(self.places[q], k, moved.bias)

    def select(self, batch: Pick, heads: Pick) -> Bias:
        return PlacedBias(self.bias.select(batch, heads), self.places)

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        return self.bias.pick(batch, heads)

    def __repr__(self) -> str:
        return f"{self.bias!r} of {len(self.places)} queries"


def placed_mask(mask: Mask | None, places: Tensor, length: int, start: int | None) -> Mask | None:
    """A bound mask of a whole call for the queries at some places."""
    match mask:
        case None:
            return None
        case And() | Or():
            left = placed_mask(mask.left, places, length, start)
            right = placed_mask(mask.right, places, length, start)
            return type(mask)(left, right)  # type: ignore[arg-type]
        case Not():
            return Not(placed_mask(mask.mask, places, length, start))  # type: ignore[arg-type]
        case Prefix():
            return mask
        case Keep():
            n = mask.table.shape[2]
            return mask if n == 1 else Keep(mask.table[:, :, places])
    return PlacedMask(mask, places, length, start)


def placed_bias(bias: Bias | None, places: Tensor, start: int | None) -> Bias | None:
    """A bound bias of a whole call for the queries at some places."""
    match bias:
        case None:
            return None
        case Dense():
            return bias if bias.tensor.shape[2] == 1 else Dense(bias.tensor[:, :, places])
        case Alibi(offset=int(offset)) | Relative(offset=int(offset)) if start is not None:
            return replace(bias, offset=offset + start)
    return PlacedBias(bias, places)
