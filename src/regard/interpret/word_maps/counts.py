"""How many objects a map shows, at one threshold and at all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median_low
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.display import table_html, table_text
from regard.errors import RegardError
from regard.interpret.word_maps.components import Connected, labelled, peaks, sizes
from regard.visible import visible

By = Literal["components", "peaks"]
Frames = Literal["each", "together"]
SWEEP = tuple(n / 50 for n in range(1, 50))
"""The thresholds at which objects are counted, besides the one that was asked for."""


@dataclass(frozen=True)
class Spot:
    """An object in a map: its highest cell, and how many cells it has."""

    frame: int
    row: int
    column: int
    size: int
    height: float
    """Of its highest cell, from 0, the lowest of the map, to 1, its highest."""


@dataclass(frozen=True)
class Span:
    """Thresholds from `low` to `high`, in all of which the count is the same."""

    count: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.2f}–{self.high:.2f}"


@dataclass(frozen=True, repr=False)
class Counted:
    """The objects of a word's map, beside how many the prompt asked for. Prints as a table."""

    word: str
    asked: int | None
    found: int
    """With frames each for itself, the median of theirs (the lower of two)."""
    each_frame: tuple[int, ...]
    """One number, if frames were taken together."""
    objects: tuple[Spot, ...]
    threshold: float
    by: By
    thresholds: tuple[float, ...]
    counts: tuple[int, ...]
    """At each of `thresholds`."""

    @property
    def agrees(self) -> bool | None:
        """Whether as many were found as were asked for; None if no number was asked for."""
        return None if self.asked is None else self.found == self.asked

    @property
    def spans(self) -> tuple[Span, ...]:
        """Runs of thresholds at which the count is the same, from the lowest threshold on."""
        runs = groupby(zip(self.thresholds, self.counts, strict=True), key=lambda pair: pair[1])
        found = []
        for count, run in runs:
            ends = [threshold for threshold, _ in run]
            found.append(Span(count, ends[0], ends[-1]))
        return tuple(found)

    @property
    def stable(self) -> Span | None:
        """The longest of them with an object; of two that are as long, that with more objects."""
        some = [span for span in self.spans if span.count]
        return max(
            some, key=lambda span: (round(span.high - span.low, 9), span.count), default=None
        )

    @property
    def asked_span(self) -> Span | None:
        """The longest in which the count is what was asked for, if there is one."""
        right = [span for span in self.spans if span.count == self.asked]
        return max(right, key=lambda span: span.high - span.low, default=None)

    def record(self) -> dict[str, Any]:
        """As plain values, for JSON or a data frame."""
        spans = {"stable": self.stable, "asked_span": self.asked_span}
        return {
            "word": self.word, "asked": self.asked, "found": self.found, "agrees": self.agrees,
            "each_frame": list(self.each_frame), "threshold": self.threshold, "by": self.by,
            "thresholds": list(self.thresholds), "counts": list(self.counts),
            "objects": [vars(spot).copy() for spot in self.objects],
            **{name: None if s is None else vars(s).copy() for name, s in spans.items()},
        }  # fmt: skip

    def _table(self) -> list[list[str]]:
        film = len(self.each_frame) > 1 or any(spot.frame for spot in self.objects)
        head = [
            visible(self.word),
            *(["frame"] if film else []),
            "row",
            "column",
            "cells",
            "height",
        ]
        rows = [
            [
                str(n), *([str(spot.frame)] if film else []), str(spot.row), str(spot.column),
                str(spot.size), f"{spot.height:.2f}",
            ]
            for n, spot in enumerate(self.objects, start=1)
        ]  # fmt: skip
        return [head, *rows]

    def _notes(self) -> list[str]:
        asked = "" if self.asked is None else f", {self.asked} asked for"
        each = (
            f" (frames: {', '.join(map(str, self.each_frame))})" if len(self.each_frame) > 1 else ""
        )
        notes = [f"{self.found} by {self.by} at threshold {self.threshold:.2f}{asked}{each}"]
        if self.stable is not None:
            notes.append(f"most stable: {self.stable.count}, at thresholds {self.stable}")
        if self.asked is not None:
            held = self.asked_span
            notes.append(
                f"{self.asked} at no threshold" if held is None else f"{self.asked} at {held}"
            )
        return notes

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())


def counted(
    values: Float[Tensor, "frames height width"],
    *,
    word: str = "map",
    asked: int | None = None,
    threshold: float = 0.5,
    by: By = "components",
    connected: Connected = 8,
    distance: float = 2.0,
    smallest: int = 1,
    frames: Frames = "each",
) -> Counted:
    """The objects of a map.

    Thresholds are between the lowest value of the map (0) and its highest (1), in all frames. By
    "components" an object is a region above the threshold of at least `smallest` cells; by "peaks"
    it is a cell above it that is higher than all around it, `distance` cells or more from any
    higher one. Frames are counted each for itself, or a region goes through them.

    >>> map = torch.zeros(1, 5, 9)
    >>> map[0, 1, [1, 4, 7]] = torch.tensor([1.0, 0.8, 0.3])
    >>> counted(map, word="circles", asked=3)
    circles  row  column  cells  height
    1          1       1      1    1.00
    2          1       4      1    0.80
    2 by components at threshold 0.50, 3 asked for
    most stable: 2, at thresholds 0.32–0.80
    3 at 0.02–0.30
    """
    _check(values, threshold, by, smallest, frames, distance)
    values = values.detach().double().cpu()
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(high - low):
        raise RegardError("the map is not finite", got=f"{low} to {high}")
    thresholds = tuple(sorted({*SWEEP, threshold}))
    if high == low:
        empty = (0,) * (len(values) if frames == "each" else 1)
        zeros = (0,) * len(thresholds)
        return Counted(word, asked, 0, empty, (), threshold, by, thresholds, zeros)
    scaled = (values - low) / (high - low)
    parts = list(scaled.split(1)) if frames == "each" else [scaled]
    found: Sequence[_Peaks | _Regions]
    if by == "peaks":
        found = [_by_peaks(part, thresholds, distance) for part in parts]
    else:
        found = [_by_components(part, thresholds, connected, smallest) for part in parts]
    sweep = [median_low(counts) for counts in zip(*(f.counts for f in found), strict=True)]
    at = thresholds.index(threshold)
    objects = [
        Spot(n if frames == "each" else spot.frame, spot.row, spot.column, spot.size, spot.height)
        for n, f in enumerate(found)
        for spot in f.objects(threshold)
    ]
    each = tuple(f.counts[at] for f in found)
    return Counted(
        word, asked, sweep[at], each, tuple(objects), threshold, by, thresholds, tuple(sweep)
    )


@dataclass(frozen=True)
class _Regions:
    scaled: Float[Tensor, "frames height width"]
    labels: Int[Tensor, "thresholds frames height width"]
    thresholds: tuple[float, ...]
    smallest: int

    @property
    def counts(self) -> list[int]:
        return [len(self._kept(labels)) for labels in self.labels]

    def _kept(self, labels: Int[Tensor, "frames height width"]) -> dict[int, int]:
        return {n: size for n, size in sizes(labels).items() if size >= self.smallest}

    def objects(self, threshold: float) -> list[Spot]:
        labels = self.labels[self.thresholds.index(threshold)]
        found = []
        for number, size in self._kept(labels).items():
            inside = torch.where(labels == number, self.scaled, -1.0)
            place = int(inside.argmax())
            frame, row, column = (
                int(i) for i in torch.unravel_index(torch.tensor(place), labels.shape)
            )
            found.append(Spot(frame, row, column, size, float(inside.max())))
        return sorted(found, key=lambda spot: -spot.height)


def _by_components(
    scaled: Tensor, thresholds: tuple[float, ...], connected: Connected, smallest: int
) -> _Regions:
    levels = torch.tensor(thresholds, dtype=scaled.dtype)[:, None, None, None]
    return _Regions(scaled, labelled(scaled >= levels, connected), thresholds, smallest)


@dataclass(frozen=True)
class _Peaks:
    scaled: Float[Tensor, "frames height width"]
    places: list[tuple[int, int, int]]
    thresholds: tuple[float, ...]

    @property
    def counts(self) -> list[int]:
        heights = [float(self.scaled[place]) for place in self.places]
        return [sum(height >= level for height in heights) for level in self.thresholds]

    def objects(self, threshold: float) -> list[Spot]:
        every = [Spot(*place, 1, float(self.scaled[place])) for place in self.places]
        return [spot for spot in every if spot.height >= threshold]


def _by_peaks(scaled: Tensor, thresholds: tuple[float, ...], distance: float) -> _Peaks:
    return _Peaks(scaled, peaks(scaled, distance), thresholds)


def _check(
    values: Tensor, threshold: float, by: str, smallest: int, frames: str, distance: float
) -> None:
    if values.ndim != 3 or not values.numel():
        raise RegardError(
            "objects are counted in a map", got=str(list(values.shape)),
            accepted="[frames, rows, columns]",
        )  # fmt: skip
    if not 0 < threshold < 1:
        raise RegardError(
            "threshold= lies between the lowest value of a map and its highest",
            got=str(threshold),
            accepted="more than 0 and less than 1",
        )
    if by not in ("components", "peaks"):
        raise RegardError(
            "by= says what an object is", got=repr(by), accepted='"components" or "peaks"'
        )
    if frames not in ("each", "together"):
        raise RegardError(
            "frames= says whether an object goes through frames",
            got=repr(frames),
            accepted='"each" or "together"',
        )
    if smallest < 1 or distance < 1:
        raise RegardError(
            "an object has cells, and lies apart from others",
            got=f"smallest={smallest}, distance={distance}",
            accepted="1 or more of each",
        )
