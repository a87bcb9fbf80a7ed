"""What a rank's queries see of the keys of one rank: a call of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.masks.tiles import EMPTY, Tiles
from regard.parallel.layout import Layout, Run
from regard.parallel.placed_masks import SomeKeys, placed_bias, placed_mask
from regard.parallel.ranks import Ranks

JUDGED = 1 << 16
"""Pairs of runs up to which a mask is asked whether it hides them all."""


class Block(NamedTuple):
    """The queries of this rank and the keys of one, where queries and keys count from 0."""

    inputs: AttentionInputs
    places: Int[Tensor, "k"]
    """Where the keys stand in the sequence."""


@dataclass(frozen=True)
class Blocks:
    """The blocks that one rank's queries make with the keys of each."""

    ranks: Ranks
    layout: Layout
    key_layout: Layout

    @property
    def places(self) -> Int[Tensor, "n"]:
        """Where the queries of this rank stand, on the CPU."""
        return self.layout.positions(self.ranks.rank)

    def block(self, x: AttentionInputs, owner: int, k: Tensor, v: Tensor) -> Block:
        """The queries of a call, whose mask and bias speak of the whole sequence, with the keys of
        a rank."""
        device = x.q.device
        queries = self.layout.positions(self.ranks.rank, device)
        keys = SomeKeys(self.key_layout.positions(owner, device), self.key_layout.length)
        start = self._start(owner)
        mask = placed_mask(x.mask, queries, self.layout.length, start, keys)
        bias = placed_bias(x.bias, queries, start, keys)
        return Block(replace(x, k=k, v=v, mask=mask, bias=bias), keys.places)

    def hidden(self, mask: Mask | None) -> frozenset[int]:
        """The ranks whose keys this rank's queries cannot see, as far as the mask shows without a
        look at every pair."""
        mine, owners = self.layout.runs[self.ranks.rank], range(self.ranks.size)
        without = {owner for owner in owners if not mine or not self.key_layout.lengths[owner]}
        # Asked of the CPU, which need not wait for the device.
        here = None if mask is None else mask.map_tensors(Tensor.cpu)
        unseen = {
            owner
            for owner in owners
            if here is not None and owner not in without
            if _hides(here, mine, self.key_layout.runs[owner])
        }
        return frozenset(without | unseen)

    def _start(self, owner: int) -> int | None:
        """How far the first query stands behind the first key, where both are runs."""
        mine, theirs = self.layout.runs[self.ranks.rank], self.key_layout.runs[owner]
        return mine[0][0] - theirs[0][0] if len(mine) == len(theirs) == 1 else None


def _hides(mask: Mask, queries: tuple[Run, ...], keys: tuple[Run, ...]) -> bool:
    """Whether no query of some runs sees a key of others."""
    if len(queries) * len(keys) > JUDGED:
        return False
    q, k = torch.tensor(queries), torch.tensor(keys)
    rows, columns = q.repeat_interleave(len(k), 0), k.repeat(len(q), 1)
    state = mask.judge(Tiles(rows[:, 0], rows[:, 1], columns[:, 0], columns[:, 1]))
    return bool((state == EMPTY).all())
