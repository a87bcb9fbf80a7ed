"""Parts of a picture, as numbers. `regard.view.pictures.lab_picture` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Panel:
    """What every part has: a title, and a sentence on what to see in it."""

    title: str
    caption: str


@dataclass(frozen=True)
class Line:
    """One line, named beside its end. `dashed` is for what is expected, or for comparison."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    ranges: Sequence[tuple[float, float]] = ()
    """The least and the largest y of several seeds, drawn as a band."""


@dataclass(frozen=True)
class Lines(Panel):
    """Lines over common axes. Lines of one label share a colour in all panels of a picture."""

    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    percent: bool = False
    """y are shares, from 0 to 1."""

    @property
    def has_ranges(self) -> bool:
        """Whether it tells of several seeds."""
        return any(line.ranges for line in self.lines)


@dataclass(frozen=True)
class Bars(Panel):
    """Groups of bars: for each label of `series` one value in every group."""

    y: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float]]
    percent: bool = False
    ranges: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """The least and the largest value of several seeds, drawn as a line over each bar."""

    @property
    def has_ranges(self) -> bool:
        """Whether it tells of several seeds."""
        return bool(self.ranges)


@dataclass(frozen=True)
class HeatMap(Panel):
    """A matrix with a name for each row and column."""

    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]
    scale: str
    """What the colours mean."""
    y: str = ""
    x: str = ""
    signed: bool = False
    """Colours that differ below and above 0."""


@dataclass(frozen=True)
class Point:
    """A word at a place (x, y); `start` is where an arrow to it begins."""

    label: str
    at: Sequence[float]
    group: str
    start: Sequence[float] | None = None


@dataclass(frozen=True)
class Points(Panel):
    """Words at their places. Points of one group share a colour."""

    x: str
    y: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Graph(Panel):
    """Nodes at their places, and edges as wide as their weights, by the numbers of their nodes.
    Nodes of one group share a colour."""

    points: Sequence[Point]
    edges: Mapping[tuple[int, int], float]


def smoothed(values: Sequence[float], points: int = 60) -> tuple[list[float], list[float]]:
    """What happened at every step, as a line: means over equal runs, at the last step of each.

    >>> smoothed([0.0, 1.0, 2.0, 3.0], points=2)
    ([2.0, 4.0], [0.5, 2.5])
    """
    size = max(1, len(values) // points)
    ends = range(size, len(values) + 1, size)
    return [float(end) for end in ends], [sum(values[end - size : end]) / size for end in ends]
