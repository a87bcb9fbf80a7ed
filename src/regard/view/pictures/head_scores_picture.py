"""What every head of a model does: a word for each, and its scores, as layers × heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import SIZE, Sheet, save, sheet  # isort: skip
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator
from matplotlib.transforms import offset_copy

from regard.interpret import HeadScores
from regard.interpret.head_scores.tables.badge_rules import RULES
from regard.interpret.head_scores.tables.score_names import COUNTS
from regard.view.pictures.line_ends import COLOURS, ON_DARK
from regard.view.pictures.trace_pictures import _ticks

__all__ = ["head_scores_picture", "save"]

DRAWN = (
    "previous", "next", "first", "separator", "duplicate", "probe duplicate", "induction",
    "probe induction", "copying", "suppression", "entropy", "distance",
)  # fmt: skip
ACROSS = 5
BELOW = 27.0
"""How far the words of a panel reach below it, in points: numbers of heads, and what they are."""


def head_scores_picture(
    found: HeadScores, *, title: str | None = None, dark: bool = False
) -> Figure:
    """A panel of badges, and one for each score that is known.

    >>> import torch
    >>> from regard import interpret
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    >>> found = interpret.heads(model, torch.randn(2, 5, 16), probes=False, random=False)
    >>> figure = head_scores_picture(found)
    >>> [axes.get_title("left") for axes in figure.axes[:3]]
    ['badge', 'previous', 'next']
    """
    names = [name for name in DRAWN if name in found.names]
    layers = len(found.paths)
    heads = max(len(row) for row in found.badges())
    cell = min(0.2, max(0.06, 3.2 / max(layers, heads)))
    across = min(ACROSS, len(names) + 1)
    down = math.ceil((len(names) + 1) / across)
    wide, tall = max(1.15, heads * cell) + 0.6, max(0.5, layers * cell) + 0.75
    with sheet(across * wide, down * tall + 0.5, [title or ""], dark=dark) as page:
        places = list(page.figure.subplots(down, across, squeeze=False).flat)
        for axes in places[len(names) + 1 :]:
            axes.set_visible(False)
        _words(page, places[0], found.badges(), heads, dark=dark)
        for axes, name in zip(places[1:], names, strict=False):
            _score(page, axes, found, name, heads)
        for axes in places[::across]:
            axes.set_ylabel("layer", **page.words(color=page.ink.faint))
        if title:
            page.figure.suptitle(page.write(title), **page.words(fontsize=SIZE + 1))
    return page.figure


def _words(
    page: Sheet, axes: Axes, badges: Sequence[Sequence[str]], heads: int, *, dark: bool
) -> None:
    colours = dict(zip(RULES, ON_DARK if dark else COLOURS, strict=False))
    order = [*RULES, ""]
    grid = [[*(order.index(w) for w in row), *[len(RULES)] * (heads - len(row))] for row in badges]
    page.bare(axes)
    blank = "#2b2b2b" if dark else "#ececec"
    axes.pcolormesh(
        grid, cmap=ListedColormap([*colours.values(), blank]), norm=Normalize(0, len(RULES)),
        edgecolors=page.ink.page, linewidth=0.4,
    )  # fmt: skip
    _placed(page, axes, heads, len(grid), "badge")
    there = [word for word in RULES if any(word in row for row in badges)]
    if there:
        axes.legend(
            handles=[Patch(color=colours[word], label=word) for word in there],
            loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2,
            bbox_transform=offset_copy(axes.transAxes, page.figure, y=-BELOW, units="points"),
            frameon=False, fontsize=SIZE - 2, labelcolor=page.ink.text, handlelength=0.8,
            columnspacing=0.8,
        )  # fmt: skip


def _score(page: Sheet, axes: Axes, found: HeadScores, name: str, heads: int) -> None:
    grid = [[*row, *[math.nan] * (heads - len(row))] for row in found.grid(name)]
    known = [value for row in grid for value in row if not math.isnan(value)]
    most = max(known) or 1.0 if name in COUNTS else 1.0
    page.bare(axes)
    drawn = axes.pcolormesh(
        grid, cmap=page.ink.weights, norm=Normalize(0, most), edgecolors=page.ink.page,
        linewidth=0.4,
    )  # fmt: skip
    _placed(page, axes, heads, len(grid), name)
    bar = page.scale(drawn, axes, "", cax=axes.inset_axes((1.04, 0.0, 0.05, 1.0)))
    bar.locator = MaxNLocator(3) if name in COUNTS else FixedLocator([0.0, 0.5, 1.0])
    bar.update_ticks()


def _placed(page: Sheet, axes: Axes, heads: int, layers: int, title: str) -> None:
    axes.set_aspect("equal")
    axes.set_ylim(layers, 0)
    for set_ticks, n in ((axes.set_xticks, heads), (axes.set_yticks, layers)):
        set_ticks([tick + 0.5 for tick in _ticks(n)], [str(t) for t in _ticks(n)], **page.words())
    axes.set_xlabel("head", **page.words(color=page.ink.faint))
    axes.set_title(title, loc="left", **page.words())
