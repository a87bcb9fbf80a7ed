"""What a scan found of every head, as layers × heads."""

from __future__ import annotations

import math

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import SIZE, Sheet, save, sheet  # isort: skip
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from regard.scanning import Scan
from regard.view.pictures.head_scores_picture import _placed

__all__ = ["save", "scan_picture"]

MEANING = {
    "entropy": "entropy, nats",
    "max_logit": "largest logit of a row",
    "first": "on the first token",
    "distance": "distance, tokens",
    "norm": "length of output",
}
ROLES = ("previous", "duplicate", "induction", "separator", "offset")
ACROSS = 5


def scan_picture(found: Scan, *, title: str | None = None, dark: bool = False) -> Figure:
    """A panel for the mean of each statistic, and one for each score of roles.

    Colours go from the least to the most that any head has, but for shares, which go from 0 to 1.
    """
    names = [*found.statistics, *(name for name in ROLES if name in found.roles)]
    layers, heads = len(found.paths), max(len(row) for row in found.grid(names[0]))
    cell = min(0.2, max(0.06, 3.2 / max(layers, heads)))
    across = min(ACROSS, len(names))
    down = math.ceil(len(names) / across)
    wide, tall = max(1.35, heads * cell) + 0.65, max(0.5, layers * cell) + 0.75
    with sheet(across * wide, down * tall + 0.5, [title or ""], dark=dark) as page:
        places = list(page.figure.subplots(down, across, squeeze=False).flat)
        for axes in places[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(places, names, strict=False):
            _panel(page, axes, found, name, heads)
        for axes in places[::across]:
            axes.set_ylabel("layer", **page.words(color=page.ink.faint))
        if title:
            page.figure.suptitle(page.write(title), **page.words(fontsize=SIZE + 1))
    return page.figure


def _panel(page: Sheet, axes: Axes, found: Scan, name: str, heads: int) -> None:
    grid = [[*row, *[math.nan] * (heads - len(row))] for row in found.grid(name)]
    known = [value for row in grid for value in row if not math.isnan(value)]
    share = name == "first" or name not in MEANING
    low = 0.0 if share or not known else min(0.0, *known)
    high = 1.0 if share or not known else max(*known, low) or 1.0
    page.bare(axes)
    drawn = axes.pcolormesh(
        grid, cmap=page.ink.weights, norm=Normalize(low, high), edgecolors=page.ink.page,
        linewidth=0.4,
    )  # fmt: skip
    _placed(page, axes, heads, len(grid), MEANING.get(name, name))
    bar = page.scale(drawn, axes, "", cax=axes.inset_axes((1.04, 0.0, 0.05, 1.0)))
    bar.locator = FixedLocator([0.0, 0.5, 1.0]) if share else MaxNLocator(3)
    bar.update_ticks()
