"""How much shared memory kernels take, estimated before they are compiled, and settings that fit.

Settings are measured on Hopper. A card with less memory gets fewer stages of the pipeline, then
smaller tiles. Tests and `python -m regard.backends.triton.prepared.check_cards` compare what is
estimated here with what the compiler allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from regard.backends.triton.settings.cards import Card

LEAST = 16
"""The shortest side of a tile that products take."""
FEWEST = 2
"""Stages below which nothing is loaded ahead: a smaller tile is better."""
_WARP = 16
"""Rows of a product that a warp computes. With fewer for each, warps exchange their weights."""
_FLOAT = 4
"""Bytes of a logit or weight."""
_BARRIERS = 64
"""Bytes of the barriers of a pipeline."""


@dataclass(frozen=True)
class Tiled:
    """The settings of a kernel that decide how much memory it takes."""

    rows: int
    keys: int
    warps: int = 8
    stages: int = 2

    @property
    def pairs(self) -> int:
        return self.rows * self.keys


How = TypeVar("How", bound=Tiled)


class Row(NamedTuple):
    """Bytes that a call has for a query or a key, as tiles hold them, and for a pair."""

    key: int
    value: int
    pair: int = 0
    """Of a bias, or of a mask that is read."""
    float32: bool = False

    @property
    def both(self) -> int:
        return self.key + self.value


def _held(how: Tiled, card: Card) -> int:
    """How many tiles are in memory at once of what a loop loads."""
    return how.stages if card.multiplies_memory else max(1, how.stages - 1)


def _numbers(how: Tiled, card: Card) -> int:
    """Barriers of the pipeline, and numbers of rows that pass from one layout to another."""
    return _BARRIERS + (8 * _FLOAT * how.rows if card.multiplies_memory else 0)


def of_forward(how: Tiled, row: Row, card: Card, *, checked: bool) -> int:
    """Of the forward kernel; values are checked where a hidden NaN is kept out at once."""
    own, k, v = how.rows * row.key, how.keys * row.key, how.keys * row.value
    weights = _FLOAT * how.pairs
    if how.stages == 1 and not card.multiplies_memory:
        loaded = max(k, v) + how.pairs * row.pair
        # Three products of TF32 parts hold the parts of the queries as well.
        return 2 * own + max(loaded, weights) if row.float32 else own + loaded + weights
    exchanged = 0
    if checked or how.rows < _WARP * how.warps:
        exchanged = weights
    elif how.stages <= 2 or card.multiplies_memory:
        exchanged = weights // 2
    beside = v if checked and row.float32 else 0
    loaded = k + v + how.pairs * row.pair
    return own + _held(how, card) * loaded + exchanged + beside + _numbers(how, card)


def of_key_gradients(how: Tiled, row: Row, card: Card) -> int:
    """Of the backward kernel that owns keys."""
    loaded = how.rows * row.both + how.pairs * row.pair
    beside = how.rows * max(row.key, row.value) if how.stages == 1 else _FLOAT // 2 * how.pairs
    return how.keys * row.both + _held(how, card) * loaded + beside


def of_query_gradients(how: Tiled, row: Row, card: Card) -> int:
    """Of the backward kernel that owns queries."""
    loaded = how.keys * row.both + how.pairs * row.pair
    beside = 0 if how.stages == 1 else _FLOAT // 2 * how.pairs + _numbers(how, card)
    return how.rows * row.both + _held(how, card) * loaded + beside


def of_second_pass(how: Tiled, row: Row, card: Card) -> int:
    """Of the kernel of the second pass that needs most: what keys received, or some keys'
    weights."""
    loaded = how.rows * (row.key + _FLOAT) + how.pairs * row.pair
    beside = _FLOAT * how.pairs if how.stages == 1 else 16 * (how.rows + how.keys)
    received = how.keys * row.key + _held(how, card) * loaded + beside
    mass = (2 if row.float32 else 1) * how.rows * row.key + LEAST * row.key + 64 * how.rows
    return max(received, mass)


def fitting(how: How, card: Card, bytes_of: Callable[[How], int]) -> How:
    """The first of ever smaller settings that fits."""
    for smaller in _ever_smaller(how):
        if bytes_of(smaller) <= card.shared:
            return smaller
    return smaller


def _ever_smaller(how: How) -> Iterator[How]:
    """Fewer stages, then half of the longer side and all stages again."""
    rows, keys = how.rows, how.keys
    while True:
        for stages in range(how.stages, min(how.stages, FEWEST) - 1, -1):
            yield replace(how, rows=rows, keys=keys, stages=stages)
        if rows == keys == LEAST:
            return
        if rows > keys:
            rows //= 2
        else:
            keys //= 2
