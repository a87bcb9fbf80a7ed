"""Scores of every head, added up text by text: estimates, and how far they depend on the texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.interpret.head_scores.pair_sums import Sum
from regard.interpret.head_scores.pair_totals import REACH

UNITS = 256
"""Texts that are told apart, at most; of more, several count as one."""
RESAMPLES = 2000


class Estimates(NamedTuple):
    """Of each head of a layer; NaN where nothing was counted."""

    value: Float[Tensor, "h"]
    low: Float[Tensor, "h"]
    high: Float[Tensor, "h"]


class Tally:
    """What is known of the heads of some layers, over texts."""

    def __init__(self, texts: int) -> None:
        self.texts, self.units = texts, min(texts, UNITS)
        self.sums: dict[str, dict[str, Tensor]] = {}
        """By layer and score: [texts, heads, 2], what is divided and by what."""
        self.offsets: dict[str, Tensor] = {}
        """By layer: [texts, heads, offsets, 2]."""
        self.heads: dict[str, int] = {}

    def add(self, path: str, index: Int[Tensor, "b"], found: Mapping[str, Sum]) -> None:
        """By the name of a score. A card is waited for once, not for each of them."""
        if not found:
            return
        both = torch.stack([torch.stack(each, -1) for each in found.values()]).cpu()
        for name, each in zip(found, both, strict=True):
            self._add(self.sums.setdefault(path, {}), name, index, each)

    def add_offsets(self, path: str, index: Int[Tensor, "b"], found: Sum) -> None:
        # Many numbers: those of one text are small enough to be added as float32.
        both = torch.stack([found[0].float(), found[1].float()], -1).cpu()
        self._add(self.offsets, path, index, both)

    def _add(self, into: dict[str, Tensor], name: str, index: Tensor, both: Tensor) -> None:
        if name not in into:
            into[name] = both.new_zeros(self.units, *both.shape[1:])
        into[name].index_add_(0, index.cpu() * self.units // self.texts, both)

    def strongest_offsets(self, path: str) -> Int[Tensor, "h"] | None:
        """The fixed offset that gets most, for each head: 1 is the token before."""
        if path not in self.offsets:
            return None
        total = self.offsets[path].sum(0, dtype=torch.float64)
        # An offset that few rows have says little of a head.
        common = total[..., 1] >= total[..., 1].amax(-1, keepdim=True) / 2
        share = torch.where(common, total[..., 0] / total[..., 1].clamp_min(1), -1.0)
        return share.argmax(-1) - REACH

    def settle_offsets(self) -> None:
        """Keep of all offsets the strongest, as the score "offset"."""
        for path, table in self.offsets.items():
            chosen = self.strongest_offsets(path)
            assert chosen is not None
            at = (chosen + REACH).view(1, -1, 1, 1).expand(len(table), -1, 1, 2)
            self.sums.setdefault(path, {})["offset"] = table.gather(2, at)[:, :, 0].double()

    def estimates(self, path: str, name: str, seed: int = 0) -> Estimates | None:
        """A score of each head: sums over texts divided, and 95 % of what texts drawn anew give."""
        table = self.sums.get(path, {}).get(name)
        if table is None:
            return None
        value = ratio(table.sum(0))
        nothing = torch.full_like(value, math.nan)
        counted = int((table[..., 1] > 0).any(-1).sum())
        if counted < 2:
            return Estimates(value, nothing, nothing)
        drawn = ratio(torch.einsum("nt,thc->nhc", draws(self.units, seed), table))
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = drawn.nanquantile(ends, 0)
        return Estimates(value, low, high)


def ratio(table: Float[Tensor, "*heads 2"]) -> Float[Tensor, "*heads"]:
    return torch.where(table[..., 1] > 0, table[..., 0] / table[..., 1], math.nan)


_DRAWN: dict[tuple[int, int], Tensor] = {}


def draws(units: int, seed: int) -> Float[Tensor, "n units"]:
    """How often each text is in each of many sets of texts, drawn with replacement."""
    if (units, seed) not in _DRAWN:
        _DRAWN.clear()
        generator = torch.Generator().manual_seed(seed)
        picked = torch.randint(units, (RESAMPLES, units), generator=generator)
        counts = torch.zeros(RESAMPLES, units, dtype=torch.float64)
        _DRAWN[units, seed] = counts.scatter_add_(1, picked, torch.ones_like(counts))
    return _DRAWN[units, seed]
