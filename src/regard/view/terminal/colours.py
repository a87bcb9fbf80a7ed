"""A colour for every weight, ordered by lightness so that any eye can read the order."""

from __future__ import annotations

from itertools import pairwise

from rich.color import Color
from rich.style import Style

Rgb = tuple[int, int, int]

STOPS: tuple[Rgb, ...] = (
    (30, 26, 58),
    (46, 62, 130),
    (40, 108, 156),
    (52, 152, 146),
    (134, 194, 104),
    (248, 226, 84),
)
GLYPHS = ".:-=+*#%@"


def colour(share: float) -> Rgb:
    """The colour of a share between 0 and 1, dark to bright.

    >>> colour(0.0), colour(1.0)
    ((30, 26, 58), (248, 226, 84))
    """
    place = min(max(share, 0.0), 1.0) * (len(STOPS) - 1)
    for step, (low, high) in enumerate(pairwise(STOPS)):
        if place <= step + 1:
            along = place - step
            red, green, blue = (round(a + (b - a) * along) for a, b in zip(low, high, strict=True))
            return red, green, blue
    raise AssertionError(place)


def ground(share: float) -> Style:
    """The style of a cell: its colour behind, and on it the ink that reads best.

    >>> str(ground(1.0))
    '#000000 on #f8e254'
    """
    behind = colour(share)
    ink = "#000000" if luminance(behind) > 0.179 else "#ffffff"
    return Style(color=ink, bgcolor=Color.from_rgb(*behind))


def glyph(share: float) -> str:
    """The mark of a share between 0 and 1 where there is no colour.

    >>> "".join(glyph(step / 10) for step in range(11))
    '..:-=+*#%@@'
    """
    return GLYPHS[min(int(min(max(share, 0.0), 1.0) * len(GLYPHS)), len(GLYPHS) - 1)]


def luminance(rgb: Rgb) -> float:
    """Relative luminance as the web's contrast rules define it: 0 black, 1 white."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in _shares(rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _shares(rgb: Rgb) -> list[float]:
    return [channel / 255 for channel in rgb]
