"""What is known of the heads of a layer, and how two such states become one.

Everything is float64 or int64. Merging in another order gives the same up to rounding; a scan
merges in the order of its shards, so that it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.scanning.scales import BINS, SCALES

TOP = 3
"""Texts that are kept for each head, statistic and end."""
ENDS = ("most", "least")


class Moments(NamedTuple):
    """How many numbers there were, their mean, and their squared distances from it added up."""

    n: Int[Tensor, "s h"]
    mean: Float[Tensor, "s h"]
    squares: Float[Tensor, "s h"]

    @staticmethod
    def of(values: Float[Tensor, "s b h q"], known: Bool[Tensor, "s b h q"]) -> Moments:
        n = known.sum((1, 3))
        there = values.masked_fill(~known, 0.0)
        mean = there.sum((1, 3)) / n.clamp_min(1)
        off = (values - mean[:, None, :, None]).masked_fill(~known, 0.0)
        return Moments(n, mean, off.square().sum((1, 3)))

    def merged(self, other: Moments) -> Moments:
        """By Chan, Golub and LeVeque: no difference of large sums."""
        n = self.n + other.n
        share = other.n.double() / n.clamp_min(1)
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart.square() * self.n.double() * share
        return Moments(n, self.mean + apart * share, squares)

    @property
    def deviation(self) -> Float[Tensor, "s h"]:
        return (self.squares / self.n).sqrt()


class Extremes(NamedTuple):
    """The texts in which a statistic is highest and lowest: the value, the number of the text, and
    the row. Values at the lower end are negated, so that both are the largest."""

    value: Float[Tensor, "e s h k"]
    text: Int[Tensor, "e s h k"]
    """-1 where there are fewer texts."""
    place: Int[Tensor, "e s h k"]

    @staticmethod
    def of(
        values: Float[Tensor, "s b h q"], known: Bool[Tensor, "s b h q"], texts: Int[Tensor, "b"]
    ) -> Extremes:
        both = torch.stack([values, -values]).masked_fill(~known, -torch.inf)
        best = both.amax(-1)
        # Of equal rows the first: which of them `max` returns is undefined.
        rows = torch.arange(both.shape[-1], device=both.device)
        place = torch.where(both == best[..., None], rows, both.shape[-1]).amin(-1)
        # [e s b h] -> [e s h b]
        best, place = best.mT.contiguous(), place.mT.contiguous()
        text = texts.to(best.device).expand(best.shape)
        none = best == -torch.inf
        found = Extremes(best, text.masked_fill(none, -1), place.masked_fill(none, -1))
        return found._first()

    def merged(self, other: Extremes) -> Extremes:
        return Extremes(*(torch.cat(pair, -1) for pair in zip(self, other, strict=True)))._first()

    def _first(self) -> Extremes:
        """The largest, of equal ones those of the first texts; each text once, as a layer that runs
        several times in a call meets it again."""
        largest = self._in(self.value.argsort(dim=-1, descending=True, stable=True))
        value, text, place = largest._in(largest.text.argsort(dim=-1, stable=True))
        again = torch.zeros_like(text, dtype=torch.bool)
        again[..., 1:] = text[..., 1:] == text[..., :-1]
        once = Extremes(
            value.masked_fill(again, -torch.inf),
            text.masked_fill(again, -1),
            place.masked_fill(again, -1),
        )
        return once._in(once.value.argsort(dim=-1, descending=True, stable=True)[..., :TOP])

    def _in(self, order: Int[Tensor, "e s h k"]) -> Extremes:
        return Extremes(*(part.gather(-1, order) for part in self))


@dataclass(frozen=True)
class LayerState:
    """Of the heads of one layer."""

    moments: Moments
    least: Float[Tensor, "s h"]
    most: Float[Tensor, "s h"]
    bins: Int[Tensor, "s h bins"]
    extremes: Extremes
    rows: Int[Tensor, "h"]
    """Rows that see something."""
    broken: Int[Tensor, "h"]
    """Those of them with NaN or infinity: they are in no statistic."""
    roles: Mapping[str, Float[Tensor, "h *offsets 2"]]
    """By the name of a score: what it adds up, and what that is divided by."""

    @staticmethod
    def of(
        names: tuple[str, ...],
        values: Float[Tensor, "s b h q"],
        seeing: Bool[Tensor, "b h q"],
        free: Bool[Tensor, "b h q"],
        texts: Int[Tensor, "b"],
        roles: Mapping[str, Float[Tensor, "h *offsets 2"]],
    ) -> LayerState:
        """Of one call. Extremes are looked for in the rows that are `free` to choose."""
        sound = seeing & values.isfinite().all(0)
        known = sound.expand(values.shape)
        bins = [
            _counted(SCALES[name].bins(v), sound) for name, v in zip(names, values, strict=True)
        ]
        H = seeing.shape[1]
        found = LayerState(
            Moments.of(values, known),
            values.masked_fill(~known, torch.inf).amin((1, 3)),
            values.masked_fill(~known, -torch.inf).amax((1, 3)),
            torch.stack(bins) if bins else seeing.new_zeros(0, H, BINS, dtype=torch.long),
            Extremes.of(values, known & free, texts),
            seeing.sum((0, 2)),
            (seeing & ~sound).sum((0, 2)),
            roles,
        )
        return LayerState.read({name: t.cpu() for name, t in found.tensors().items()})

    def merged(self, other: LayerState) -> LayerState:
        return LayerState(
            self.moments.merged(other.moments),
            torch.minimum(self.least, other.least),
            torch.maximum(self.most, other.most),
            self.bins + other.bins,
            self.extremes.merged(other.extremes),
            self.rows + other.rows,
            self.broken + other.broken,
            {name: self.roles[name] + other.roles[name] for name in self.roles},
        )

    def tensors(self) -> dict[str, Tensor]:
        """By names that `read` knows."""
        return {
            **{f"moments.{name}": t for name, t in self.moments._asdict().items()},
            "least": self.least, "most": self.most, "bins": self.bins,
            **{f"extremes.{name}": t for name, t in self.extremes._asdict().items()},
            "rows": self.rows, "broken": self.broken,
            **{f"roles.{name}": t for name, t in self.roles.items()},
        }  # fmt: skip

    @staticmethod
    def read(tensors: Mapping[str, Tensor]) -> LayerState:
        start = "roles."
        return LayerState(
            Moments(*(tensors[f"moments.{name}"] for name in Moments._fields)),
            tensors["least"],
            tensors["most"],
            tensors["bins"],
            Extremes(*(tensors[f"extremes.{name}"] for name in Extremes._fields)),
            tensors["rows"],
            tensors["broken"],
            {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)},
        )


@dataclass(frozen=True)
class State:
    """Of all layers, in their order; and how much was read."""

    layers: Mapping[str, LayerState]
    texts: int = 0
    tokens: int = 0
    cut: int = 0
    """Texts of which only the beginning was read."""
    empty: int = 0
    """Texts that hold no token."""

    def merged(self, other: State) -> State:
        both = {**self.layers, **other.layers}
        return State(
            {
                path: self.layers[path].merged(other.layers[path])
                if path in self.layers and path in other.layers
                else state
                for path, state in both.items()
            },
            self.texts + other.texts,
            self.tokens + other.tokens,
            self.cut + other.cut,
            self.empty + other.empty,
        )


def _counted(bins: Int[Tensor, "b h q"], known: Bool[Tensor, "b h q"]) -> Int[Tensor, "h bins"]:
    H = bins.shape[1]
    heads = torch.arange(H, device=bins.device)[:, None]
    found = torch.bincount((bins + heads * BINS)[known], minlength=H * BINS)
    return found.view(H, BINS)
