"""The maps of a prompt's words over a picture, with the objects that are counted in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Before matplotlib itself: where that is missing, this says what to do.
from regard.view.pictures.theme import SIZE, Sheet, sheet  # isort: skip
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.word_maps import Counted, Grounding
from regard.view.atlas.patches import pixels_of

ACROSS = 6
"""Maps in a row."""
INCHES = 1.5


def word_maps(
    found: Grounding,
    words: str | Sequence[str] | None = None,
    *,
    picture: Tensor | None = None,
    frames: Sequence[int] | None = None,
    title: str | None = None,
    dark: bool = False,
    **how: Any,
) -> Figure:
    """The map of each word, on one scale for each, with a ring around each object that is counted.

    `picture` is what was painted, shown first: [channels, height, width] or [height, width,
    channels], bytes or numbers from 0 to 1. Of a film a word has a row, with `frames` in it; six
    of them, evenly apart, unless said. Other arguments are those of `Grounding.count`.

    >>> import torch
    >>> map = torch.zeros(1, 1, 6, 6)
    >>> map[0, 0, 1, 1] = map[0, 0, 4, 4] = 1
    >>> both = Grounding(("cats",), map, (), ("attn2",), (0,), ("two", "cats"))
    >>> [axes.get_title("left") for axes in word_maps(both).axes if axes.get_title("left")]
    ['cats: 2 of 2']
    """
    chosen = found.words if words is None else (words,) if isinstance(words, str) else tuple(words)
    counts = [found.count(word, **how) for word in chosen]
    film = found.grid[0] > 1
    if film and picture is not None:
        raise RegardError(
            "picture= is one picture", got=f"a film of {found.grid[0]} frames", do="leave it out"
        )
    if film:
        many = found.grid[0]
        shown = _evenly(many) if frames is None else list(frames)
        if not shown or not all(0 <= frame < many for frame in shown):
            raise RegardError("no such frames", got=str(shown), accepted=f"0 to {many - 1}")
    else:
        shown = [0]
    panels = len(chosen) * len(shown) + (picture is not None)
    across = len(shown) if film else min(ACROSS, panels)
    down = math.ceil(panels / across)
    tall = found.grid[1] / found.grid[2]
    size = (INCHES * across + 0.2, (INCHES * tall + 0.45) * down + (0.3 if title else 0))
    texts = [title or "", *(_label(count) for count in counts)]
    with sheet(*size, texts, dark=dark) as page:
        places = list(page.figure.subplots(down, across, squeeze=False).flat)
        for axes in places[panels:]:
            axes.set_visible(False)
        if picture is not None:
            axes = page.bare(places.pop(0))
            pixels = pixels_of(picture).cpu().numpy()
            axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels,
                        cmap="gray", interpolation="nearest")  # fmt: skip
            axes.set_xticks([])
            axes.set_yticks([])
            page.title(axes, "picture")
        for n, (word, count) in enumerate(zip(chosen, counts, strict=True)):
            norm = Normalize(0, float(found.map(word).max()) or 1.0)
            for place, frame in enumerate(shown):
                axes = places[n * len(shown) + place]
                _draw(page, axes, found.map(word)[frame], norm, count, frame)
                says = _label(count) if not place else ""
                if film:
                    faint = page.words(color=page.ink.faint, fontsize=SIZE - 1)
                    axes.set_xlabel(f"frame {frame}: {_in_frame(count, frame)}", **faint)
                if says:
                    page.title(axes, says)
        if title:
            page.figure.suptitle(page.write(title), **page.words(fontsize=SIZE + 1))
    return page.figure


def _draw(
    page: Sheet, axes: Axes, map: Tensor, norm: Normalize, count: Counted, frame: int
) -> None:
    page.bare(axes)
    axes.imshow(map.cpu().numpy(), cmap=page.ink.weights, norm=norm, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    spots = [spot for spot in count.objects if spot.frame == frame]
    # A ring in two colours is seen on the lightest cell and on the darkest.
    for colour, width in ((page.ink.page, 2.4), (page.ink.back, 1.2)):
        axes.scatter([spot.column for spot in spots], [spot.row for spot in spots], s=42,
                     facecolors="none", edgecolors=colour, linewidths=width)  # fmt: skip


def _label(count: Counted) -> str:
    asked = "" if count.asked is None else f" of {count.asked}"
    return f"{count.word}: {count.found}{asked}"


def _in_frame(count: Counted, frame: int) -> int:
    return sum(spot.frame == frame for spot in count.objects)


def _evenly(many: int, most: int = ACROSS) -> list[int]:
    """Frames evenly apart, the first and the last among them.

    >>> _evenly(21), _evenly(3)
    ([0, 4, 8, 12, 16, 20], [0, 1, 2])
    """
    if many <= most:
        return list(range(many))
    return [round(i * (many - 1) / (most - 1)) for i in range(most)]
