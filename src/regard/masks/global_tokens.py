"""A few tokens that see everything and are seen by all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.device_copies import moved
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.tiles import Tiles, states
from regard.values import Shape, end_aligned, readable, whole, whole_numbers


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(Mask):
    indices: Tensor
    offset: int | None = None

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        offset = end_aligned(self.offset, shape)
        return BoundGlobalTokens(moved(self.indices, device), offset, shape.Q, shape.K)


@dataclass(frozen=True, eq=False, repr=False)
class BoundGlobalTokens(Mask):
    indices: Tensor
    offset: int
    queries: int
    keys: int

    @property
    def _flags(self) -> tuple[Tensor, Tensor]:
        """For each query and each key: is it global?"""
        # The compiler does not look into what is kept (Python 3.11), and needs no more than this.
        return self._flagged() if torch.compiler.is_compiling() else self._kept_flags

    @cached_property
    def _kept_flags(self) -> tuple[Tensor, Tensor]:
        return self._flagged()

    def _flagged(self) -> tuple[Tensor, Tensor]:
        flags = []
        # What is subtracted from a byte would be a byte.
        positions = self.indices.long()
        for length, start in ((self.queries, self.offset), (self.keys, 0)):
            place = positions - start
            # One more, for those that are elsewhere: how many they are is not asked.
            place = torch.where((place >= 0) & (place < length), place, length)
            flag = torch.zeros(length + 1, dtype=torch.bool, device=self.indices.device)
            # As a number: torch.jit.trace knows no operator that fills with a boolean.
            flags.append(flag.index_fill(0, place, 1)[:length])
        return flags[0], flags[1]

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        looks_everywhere, seen_by_all = self._flags
        return looks_everywhere[q] | seen_by_all[k]

    def judge(self, tiles: Tiles) -> Int8[Tensor, "1 1 t"]:
        looks_everywhere, seen_by_all = self._flags
        rows = _inside(looks_everywhere, tiles.q0, tiles.q1)
        columns = _inside(seen_by_all, tiles.k0, tiles.k1)
        return states(
            full=(rows == tiles.q1 - tiles.q0) | (columns == tiles.k1 - tiles.k0),
            empty=(rows == 0) & (columns == 0),
        )


def _inside(flags: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    before = torch.nn.functional.pad(flags.cumsum(0), (1, 0))
    return before[stop] - before[start]


def global_tokens(indices: Int[Tensor, "n"] | Sequence[int], *, offset: int | None = None) -> Mask:
    """Tokens at these positions see every key, and every query sees them.

    Positions past the keys are those of tokens to come: they match nothing yet.

    >>> from regard.masks import window
    >>> print((window(1, 1) | global_tokens([0])).draw(5))
    ██████████
    ██████····
    ████████··
    ██··██████
    ██····████
    """
    problem = "global_tokens takes positions"
    accepted = "a list of whole numbers from 0, or an integer tensor [n]"
    tensor = whole_numbers(indices, (1,), problem, accepted)
    if readable(tensor) and bool((tensor < 0).any()):
        raise RegardError(problem, got=str(int(tensor.min())), accepted=accepted)
    return GlobalTokens(tensor, None if offset is None else whole("global_tokens: offset", offset))
