"""What a scan found: heads with their statistics and scores, and texts where they are extreme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.errors import RegardError
from regard.interpret.head_scores.pairs.pair_totals import REACH
from regard.interpret.head_scores.tables.score_names import SCORES
from regard.interpret.head_scores.tally import ratio
from regard.scanning.scales import SCALES
from regard.scanning.states import ENDS, TOP, LayerState, State

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class Summary:
    """A statistic of a head, over all rows of all texts."""

    mean: float
    deviation: float
    least: float
    most: float
    quantiles: Mapping[float, float]
    """To within a bin of a fixed histogram."""


@dataclass(frozen=True)
class Extreme:
    """A text in which a head does something extreme, and the row where it does."""

    layer: int
    head: int
    path: str
    statistic: str
    end: str
    """most or least."""
    rank: int
    value: float
    text: int
    """The number of the text in the corpus, from 0."""
    place: int
    """The row, from 0: the number of the token that looks."""


@dataclass(frozen=True)
class ScannedHead:
    """One head."""

    layer: int
    head: int
    path: str
    rows: int
    """Rows of all texts that see something."""
    broken: int
    """Rows with NaN or infinity, which are in no statistic."""
    statistics: Mapping[str, Summary]
    roles: Mapping[str, float]
    """Scores as `regard.interpret.heads` has them; NaN where no row gives one."""
    offset: int | None = None
    """The fixed offset that gets most: 1 is the token before."""

    def __getitem__(self, name: str) -> float:
        if name in self.statistics:
            return self.statistics[name].mean
        if name in self.roles:
            return self.roles[name]
        raise RegardError(
            "there is no such number of a head",
            got=repr(name),
            accepted=", ".join([*self.statistics, *self.roles]),
        )

    def record(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "layer": self.layer, "head": self.head, "path": self.path, "rows": self.rows,
            "broken": self.broken,
            **{
                name: {
                    "mean": s.mean, "deviation": s.deviation, "least": s.least, "most": s.most,
                    "quantiles": {f"{share:g}": value for share, value in s.quantiles.items()},
                }
                for name, s in self.statistics.items()
            },
            "roles": dict(self.roles), "offset": self.offset,
        }  # fmt: skip


@dataclass(frozen=True)
class Scan(Sequence[ScannedHead]):
    """All heads, layer by layer."""

    heads: tuple[ScannedHead, ...]
    extremes: tuple[Extreme, ...]
    paths: tuple[str, ...]
    statistics: tuple[str, ...]
    roles: tuple[str, ...]
    texts: int
    tokens: int
    cut: int
    """Texts of which only the beginning was read."""
    empty: int
    """Texts without a token."""

    def __getitem__(self, place: Any) -> Any:
        return self.heads[place]

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[ScannedHead]:
        return iter(self.heads)

    def __repr__(self) -> str:
        return (
            f"Scan({len(self)} heads of {len(self.paths)} layers, {self.texts} texts, "
            f"{self.tokens} tokens)"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every number that a head has."""
        return tuple(dict.fromkeys([*self.statistics, *self.roles]))

    def at(self, layer: int, head: int) -> ScannedHead:
        for found in self.heads:
            if (found.layer, found.head) == (layer, head):
                return found
        raise RegardError(
            "there is no such head",
            got=f"layer {layer} head {head}",
            accepted=f"{len(self.paths)} layers, {len(self)} heads",
        )

    def grid(self, name: str) -> list[list[float]]:
        """Layers × heads of a number: the mean of a statistic, or a score."""
        rows: list[list[float]] = [[] for _ in self.paths]
        for found in self.heads:
            rows[found.layer].append(found[name])
        return rows

    def sorted(self, name: str) -> list[ScannedHead]:
        """The heads, those with most of a number first; without it last."""
        return sorted(self.heads, key=lambda h: -math.inf if math.isnan(h[name]) else h[name])[::-1]

    @staticmethod
    def of(state: State, statistics: tuple[str, ...]) -> Scan:
        """What is known when everything is merged."""
        heads: list[ScannedHead] = []
        extremes: list[Extreme] = []
        for layer, (path, found) in enumerate(state.layers.items()):
            scores, offsets = _scores(found)
            deviation = found.moments.deviation
            mean = torch.where(found.moments.n > 0, found.moments.mean, math.nan)
            for head in range(len(found.rows)):
                told = {
                    name: Summary(
                        float(mean[s, head]),
                        float(deviation[s, head]),
                        float(found.least[s, head]),
                        float(found.most[s, head]),
                        _quantiles(found, name, s, head),
                    )
                    for s, name in enumerate(statistics)
                }
                heads.append(
                    ScannedHead(
                        layer, head, path, int(found.rows[head]), int(found.broken[head]), told,
                        {name: scores[name][head] for name in SCORES if name in scores},
                        None if offsets is None else offsets[head],
                    )
                )  # fmt: skip
                extremes += _extremes(found, statistics, layer, head, path)
        roles = [name for name in SCORES if heads and name in heads[0].roles]
        return Scan(
            tuple(heads), tuple(extremes), tuple(state.layers), statistics, tuple(roles),
            state.texts, state.tokens, state.cut, state.empty,
        )  # fmt: skip


def _quantiles(found: LayerState, name: str, s: int, head: int) -> dict[float, float]:
    counts = found.bins[s, head].tolist()
    low, high = float(found.least[s, head]), float(found.most[s, head])
    # Within a bin nothing is known but that no number was smaller or larger than these.
    return {q: min(max(SCALES[name].quantile(counts, q), low), high) for q in QUANTILES}


def _scores(found: LayerState) -> tuple[dict[str, list[float]], list[int] | None]:
    scores = {name: ratio(t).tolist() for name, t in found.roles.items() if name != "offset"}
    if "offset" not in found.roles:
        return scores, None
    table = found.roles["offset"]
    # An offset that few rows have says little of a head.
    common = table[..., 1] >= table[..., 1].amax(-1, keepdim=True) / 2
    share = torch.where(common, table[..., 0] / table[..., 1].clamp_min(1), -1.0)
    best = share.amax(-1, keepdim=True)
    chosen = (share == best).int().argmax(-1)
    scores["offset"] = best[..., 0].tolist()
    return scores, (chosen - REACH).tolist()


def _extremes(
    found: LayerState, statistics: tuple[str, ...], layer: int, head: int, path: str
) -> Iterator[Extreme]:
    for s, name in enumerate(statistics):
        for e, end in enumerate(ENDS):
            value, text, place = (part[e, s, head].tolist() for part in found.extremes)
            for rank in range(min(TOP, len(text))):
                if text[rank] >= 0:
                    yield Extreme(
                        layer, head, path, name, end, rank, -value[rank] if e else value[rank],
                        text[rank], place[rank],
                    )  # fmt: skip
