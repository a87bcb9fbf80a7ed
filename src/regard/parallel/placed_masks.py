"""Masks and biases of a whole sequence, for queries and keys that stand at some of its places.

A rank that has some queries and all keys, or some keys, counts them from 0; the mask and the bias,
which were bound to the whole call, count them where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

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


class SomeKeys(NamedTuple):
    """Some of the keys of a call."""

    places: Tensor
    """Their positions, ascending."""
    length: int
    """How many keys the whole call has."""


@dataclass(frozen=True, eq=False, repr=False)
class PlacedMask(Mask):
    """A bound mask for some queries, and maybe some keys, in ascending order. Where both are
    contiguous, `start` is the position of the first query less that of the first key."""

    mask: Mask
    places: Tensor
    length: int
    """How many queries the whole call has."""
    start: int | None
    keys: Tensor | None = None
    """The positions of the keys; None for all of them."""
    key_length: int = 0
    """How many keys the whole call has, if these are some of them."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        k = k if self.keys is None else self.keys[k]
        return self.mask.allows(b, h, self.places[q], k)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        # What holds for all pairs between the first and the last of a tile holds for the tile.
        queries = self.places[tiles.q0], self.places[tiles.q1 - 1] + 1
        if self.keys is None:
            return self.mask.judge(Tiles(*queries, tiles.k0, tiles.k1))
        keys = self.keys[tiles.k0], self.keys[tiles.k1 - 1] + 1
        return self.mask.judge(Tiles(*queries, *keys))

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        return self._of(self.mask.spans(self._whole(shape), device))

    def spans_of_rest(self, shape: Shape, device: torch.device) -> Spans | None:
        return self._of(self.mask.spans_of_rest(self._whole(shape), device))

    def _whole(self, shape: Shape) -> Shape:
        K = shape.K if self.keys is None else self.key_length
        return shape._replace(Q=self.length, K=K)

    def _of(self, found: Spans | None) -> Spans | None:
        if found is None:
            return None
        places = self.places.to(found.first.device)
        first, stop = (edge.expand(*edge.shape[:2], self.length)[..., places] for edge in found[:2])
        if self.keys is not None:
            # A run of all keys is one of some of them.
            keys = self.keys.to(first.device)
            first, stop = (torch.searchsorted(keys, edge.contiguous()) for edge in (first, stop))
        return Spans(first, stop, found.sure)

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
    """A bound bias for queries, and maybe keys, at some places."""

    bias: Bias
    places: Tensor
    keys: Tensor | None = None

    def at(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h q k"]:
        return self.bias.at(self.places[q], self._keys(k))

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor, into: list[Tensor]) -> None:
        self.bias.pull_back(self.places[q], self._keys(k), d, into)

    def push_forward(self, q: Tensor, k: Tensor, moved: Bias) -> Float[Tensor, "b h q k"]:
        assert isinstance(moved, PlacedBias)
        return self.bias.push_forward(self.places[q], self._keys(k), moved.bias)

    def select(self, batch: Pick, heads: Pick) -> Bias:
        return replace(self, bias=self.bias.select(batch, heads))

    def _keys(self, k: Tensor) -> Tensor:
        return k if self.keys is None else self.keys[k]

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        return self.bias.pick(batch, heads)

    def __repr__(self) -> str:
        return f"{self.bias!r} of {len(self.places)} queries"


def placed_mask(
    mask: Mask | None, places: Tensor, length: int, start: int | None, keys: SomeKeys | None = None
) -> Mask | None:
    """A bound mask of a whole call for the queries, and maybe keys, at some places."""
    match mask:
        case None:
            return None
        case And() | Or():
            left = placed_mask(mask.left, places, length, start, keys)
            right = placed_mask(mask.right, places, length, start, keys)
            return type(mask)(left, right)  # type: ignore[arg-type]
        case Not():
            return Not(placed_mask(mask.mask, places, length, start, keys))  # type: ignore[arg-type]
        case Prefix() if keys is None:
            return mask
        case Keep():
            return Keep(_cut(mask.table, places, keys))
    return PlacedMask(mask, places, length, start, *(keys or ()))


def placed_bias(
    bias: Bias | None, places: Tensor, start: int | None, keys: SomeKeys | None = None
) -> Bias | None:
    """A bound bias of a whole call for the queries, and maybe keys, at some places."""
    match bias:
        case None:
            return None
        case Dense():
            return Dense(_cut(bias.tensor, places, keys))
        case Alibi(offset=int(offset)) | Relative(offset=int(offset)) if start is not None:
            return replace(bias, offset=offset + start)
    return PlacedBias(bias, places, None if keys is None else keys.places)


def _cut(table: Tensor, places: Tensor, keys: SomeKeys | None) -> Tensor:
    """The part of a table of pairs; an axis of length 1 speaks of every place."""
    if table.shape[2] > 1:
        table = table[:, :, places]
    return table if keys is None or table.shape[3] == 1 else table[..., keys.places]
