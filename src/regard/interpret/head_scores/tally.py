"""Scores of every head, added up text by text: estimates, and how far they depend on the texts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.interpret.head_scores.pairs.pair_sums import Sum
from regard.interpret.head_scores.pairs.pair_totals import REACH

UNITS = 256
"""The most texts that are counted separately; of more, several count as one."""
RESAMPLES = 2000
ENDS = (0.025, 0.975)


class Estimates(NamedTuple):
    """Of each head of a layer; NaN where nothing was counted."""

    value: list[float]
    low: list[float]
    high: list[float]


class Tally:
    """What is known of the heads of some layers, over texts. It is added up where it was found: a
    card is not waited for before all texts are read."""

    def __init__(self, texts: int) -> None:
        self.texts, self.units = texts, min(texts, UNITS)
        self._sums: dict[str, dict[tuple[str, ...], Tensor]] = {}
        """By layer and scores: [scores, texts, heads, 2], what is divided and by what."""
        self._offsets: dict[str, Tensor] = {}
        """By layer: [texts, heads, offsets, 2]."""
        self._strongest: list[tuple[list[str], Tensor]] = []
        """Layers that have equally many heads, and of these, once settled: [layers, heads]."""
        self._index: tuple[Tensor, Tensor] | None = None
        """The last index, and which units it means: the same for every layer."""

    def add(self, path: str, index: Int[Tensor, "b"], found: Mapping[str, Sum]) -> None:
        """By the name of a score."""
        if not found:
            return
        both = torch.stack([torch.stack(each) for each in zip(*found.values(), strict=True)], -1)
        tables = self._sums.setdefault(path, {})
        if tuple(found) not in tables:
            tables[tuple(found)] = both.new_zeros(len(found), self.units, *both.shape[2:])
        tables[tuple(found)].index_add_(1, self._unit(index, both), both)

    def add_offsets(self, path: str, index: Int[Tensor, "b"], found: Sum) -> None:
        # Many numbers: those of one text are small enough to be added as float32.
        both = torch.stack(found, -1).float()
        if path not in self._offsets:
            self._offsets[path] = both.new_zeros(self.units, *both.shape[1:])
        self._offsets[path].index_add_(0, self._unit(index, both), both)

    def _unit(self, index: Int[Tensor, "b"], like: Tensor) -> Int[Tensor, "b"]:
        known = self._index
        if known is None or known[0] is not index or known[1].device != like.device:
            unit = (index * self.units // self.texts).to(like.device, non_blocking=True)
            self._index = known = index, unit
        return known[1]

    def settle_offsets(self) -> None:
        """Keep of all offsets the strongest, as the score "offset"."""
        totals = {path: table.sum(0, dtype=torch.float64) for path, table in self._offsets.items()}
        self._strongest = [(paths, _strongest(total)) for paths, total in _together(totals)]
        for paths, chosen in self._strongest:
            at = (chosen + REACH)[:, None, :, None, None]
            for path, place in zip(paths, at, strict=True):
                table = self._offsets[path]
                strongest = table.gather(2, place.expand(len(table), -1, 1, 2))[:, :, 0]
                self._sums.setdefault(path, {})["offset",] = strongest.double()[None]

    def strongest_offsets(self) -> dict[str, list[int]]:
        """By layer, the fixed offset that gets most, for each head, once they are settled: 1 is the
        token before."""
        found: dict[str, list[int]] = {}
        for paths, chosen in self._strongest:
            found |= dict(zip(paths, chosen.tolist(), strict=True))
        return found

    def estimates(self, seed: int = 0) -> dict[str, dict[str, Estimates]]:
        """By layer, each score of each head: sums over texts divided, and 95 % of what texts drawn
        anew give."""
        found: dict[str, dict[str, Estimates]] = {path: {} for path in self._sums}
        alike: defaultdict[tuple[str, ...], dict[str, Tensor]] = defaultdict(dict)
        for path, of_layer in self._sums.items():
            for names, table in _one_table_each(of_layer).items():
                alike[names][path] = table
        for names, by_path in alike.items():
            for paths, stacked in _together(by_path):
                tables = stacked.cpu()
                values = ratio(tables.sum(2)).tolist()
                unknown = [math.nan] * tables.shape[3]
                counted = (tables[..., 1] > 0).any(-1).sum(2).tolist()
                for i, path in enumerate(paths):
                    for j, name in enumerate(names):
                        ends = unknown, unknown
                        if counted[i][j] > 1:
                            ends = self._ends(tables[i, j], seed)
                        found[path][name] = Estimates(values[i][j], *ends)
        return found

    def _ends(
        self, table: Float[Tensor, "texts h 2"], seed: int
    ) -> tuple[list[float], list[float]]:
        drawn = ratio(torch.einsum("nt,thc->nhc", draws(self.units, seed), table))
        low, high = ends_of(drawn).tolist()
        return low, high


def _one_table_each(tables: dict[tuple[str, ...], Tensor]) -> dict[tuple[str, ...], Tensor]:
    """Each score in one table. Some texts may tell more of a layer than others: those of tokens
    beside those of vectors."""
    every = [name for names in tables for name in names]
    if len(set(every)) == len(every):
        return tables
    alone: dict[tuple[str, ...], Tensor] = {}
    for names, table in tables.items():
        for name, one in zip(names, table.split(1), strict=True):
            alone[name,] = alone[name,] + one if (name,) in alone else one
    return alone


def _together(by_path: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """The tensors of layers that have the same shape and device, as one, and whose they are."""
    alike: defaultdict[Any, list[str]] = defaultdict(list)
    for path, tensor in by_path.items():
        alike[tensor.shape, tensor.device].append(path)
    for paths in alike.values():
        yield paths, torch.stack([by_path[path] for path in paths])


def _strongest(total: Float[Tensor, "layers h offsets 2"]) -> Int[Tensor, "layers h"]:
    # An offset that few rows have says little of a head.
    common = total[..., 1] >= total[..., 1].amax(-1, keepdim=True) / 2
    share = torch.where(common, total[..., 0] / total[..., 1].clamp_min(1), -1.0)
    return share.argmax(-1) - REACH


def ratio(table: Float[Tensor, "*heads 2"]) -> Float[Tensor, "*heads"]:
    return torch.where(table[..., 1] > 0, table[..., 0] / table[..., 1], math.nan)


def ends_of(drawn: Float[Tensor, "n h"]) -> Float[Tensor, "2 h"]:
    """The quantiles that 95 % lie between, where there are numbers.

    >>> ends_of(torch.arange(201.0, dtype=torch.float64)[:, None]).tolist()
    [[5.0], [195.0]]
    """
    if bool(drawn.isnan().any()):
        return drawn.nanquantile(torch.tensor(ENDS, dtype=drawn.dtype), 0)
    # The few that lie farthest out are sooner found than all are sorted.
    by_head, most = drawn.T.contiguous(), len(drawn) - 1
    low, high = (math.floor(end * most) for end in ENDS)
    below = by_head.topk(min(low + 2, most + 1), largest=False).values[:, low:]
    above = by_head.topk(most + 1 - high).values.flip(1)[:, :2]
    return torch.stack(
        [
            torch.lerp(two[:, 0], two[:, -1], end * most % 1)
            for two, end in zip((below, above), ENDS, strict=True)
        ]
    )


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
