"""Names beside the ends of lines, in their colours: a legend that need not be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from regard.view.pictures.theme import SIZE, Sheet

# Okabe and Ito's, in an order that keeps neighbours apart in lightness too; then some more.
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8b5a2b", "#6a4fa3",
    "#8f8f00", "#7f7f7f",
)  # fmt: skip
ON_DARK = (
    "#56b4e9", "#f0803c", "#2fbf93", "#e09bc2", "#9cc9ff", "#f0b93a", "#c9a27e", "#b3a2e6",
    "#c9c94a", "#a6a6a6",
)  # fmt: skip
"""The same hues, light enough for words on a dark page."""
APART = 0.062
"""The least distance of two names, as a share of a panel's height."""


class End(NamedTuple):
    """Where a line ends, and what stands there."""

    label: str
    value: float
    colour: str
    x: float | None = None
    """Where the line ends; at the edge of its panel if that is not said."""


def name_ends(page: Sheet, axes: Axes, ends: Sequence[End], apart: float = APART) -> None:
    """Write names beside the ends of lines, moved apart where they would touch; a thin line leads
    from an end to a name that had to move."""
    named = sorted(ends, key=lambda end: end.value)
    at = [_height(axes, end.value) for end in named]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + apart)
    # What was pushed over the top comes back down, and pushes what is below it.
    highest = 1.0
    for i in reversed(range(len(at))):
        at[i] = min(at[i], highest)
        highest = at[i] - apart
    for end, height in zip(named, at, strict=True):
        if abs(height - _height(axes, end.value)) > apart / 4:
            _lead(axes, end, height)
        axes.text(
            1.02, height, page.write(end.label), transform=axes.transAxes, va="center",
            ha="left", **page.words(color=end.colour, fontsize=SIZE - 1),
        )  # fmt: skip


def _lead(axes: Axes, end: End, height: float) -> None:
    """A thin line from the end of a line to its name."""
    x, y = 1.0, _height(axes, end.value)
    if end.x is not None:
        here = axes.transData.transform((end.x, end.value))
        x = float(axes.transAxes.inverted().transform(here)[0])
    axes.plot(
        (x, 1.003, 1.018), (y, y, height), color=end.colour, linewidth=0.5, alpha=0.8,
        transform=axes.transAxes, clip_on=False, gid="leader",
    )  # fmt: skip


def _height(axes: Axes, value: float) -> float:
    """Where a value stands in its panel: 0 at the bottom, 1 at the top."""
    axes.get_ylim()  # limits are settled when asked for
    _, y = axes.transData.transform((1.0, value))
    return float(axes.transAxes.inverted().transform((0.0, y))[1])
