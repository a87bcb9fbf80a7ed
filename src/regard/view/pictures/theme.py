"""What pictures are drawn with: colours on a light or a dark page, fonts, and files that come out
the same every time."""

from __future__ import annotations

import html
import io
import logging
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from regard.arguments import path_of
from regard.errors import RegardError
from regard.files import replacing

try:
    import matplotlib
except ImportError:
    raise RegardError(
        "pictures are drawn with matplotlib, which is not installed",
        do="pip install 'regard[picture]'",
    ) from None

from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from rich.cells import cell_len, set_cell_size

from regard.view.pictures.fonts import embedded, families, written

SIZE = 8.0
"""Points: the size of text in most journals' figures."""
SHARP = 200
"""Dots an inch in a notebook."""
PRINTED = 300
"""Dots an inch in a file: what journals ask for."""
INCH = 25.4
"""Millimetres."""
MARGIN = 0.06
"""Inches around what is drawn."""
LEAST, MOST = 20, 1000
"""Millimetres that a picture may be wide."""
TRIES = 6
WORDS = re.compile(r"<text[^>]*>([^<]*)</text>")
LONGEST = 16
"""Cells of a token's label."""
FORMATS = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
SETTINGS: Any = {
    "axes.linewidth": 0.6,
    "axes.unicode_minus": False,
    "font.size": SIZE,
    "image.composite_image": False,
    "path.simplify": False,
    "pdf.compression": 6,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "regard",
    "text.usetex": False,
}


@dataclass(frozen=True)
class Theme:
    """A page, and the colours that read well on it."""

    page: str
    text: str
    faint: str
    back: str
    """What a token looks at. With `ahead`, two of Okabe and Ito's colours, told apart by all."""
    ahead: str
    """What looks at a token."""
    dark: bool

    @property
    def weights(self) -> Colormap:
        """From nothing, near the colour of the page, to the most. Perceptually uniform."""
        return _weights(self.dark)


LIGHT = Theme("#ffffff", "#1b1b1b", "#767676", "#0072b2", "#d55e00", dark=False)
DARK = Theme("#14161a", "#e9e9e9", "#979da5", "#56b4e9", "#e69f00", dark=True)


@cache
def _weights(dark: bool) -> Colormap:
    colours = [matplotlib.colormaps["magma"](step) for step in range(256)]
    return ListedColormap(colours[24:] if dark else colours[::-1][:-16], "weights")


@dataclass(frozen=True)
class Sheet:
    """A figure that is being drawn, with fonts for what will stand on it."""

    figure: Figure
    ink: Theme
    family: list[str]
    missing: set[str]

    def write(self, text: str) -> str:
        """A text as the fonts at hand can write it."""
        return written(text, self.missing)

    def label(self, token: str) -> str:
        """A token as the fonts at hand can write it, cut where it is long."""
        text = self.write(token)
        if cell_len(text) <= LONGEST:
            return text
        return set_cell_size(text, LONGEST - 1).rstrip() + "…"

    def words(self, **more: Any) -> dict[str, Any]:
        """How words are set: in fonts that have them, and never read as formulas."""
        given = {"color": self.ink.text, "fontfamily": self.family, "parse_math": False}
        return {**given, "fontsize": SIZE, **more}

    def bare(self, axes: Axes) -> Axes:
        """Axes without lines or ticks."""
        axes.set_facecolor("none")
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0, colors=self.ink.text, labelsize=SIZE - 1)
        return axes

    def title(self, axes: Axes, text: str) -> None:
        axes.set_title(self.write(text), loc="left", pad=8, **self.words(fontsize=SIZE + 1))

    def scale(self, drawn: Any, axes: Axes, label: str, **how: Any) -> Colorbar:
        """A thin bar that says what the colours mean."""
        bar = self.figure.colorbar(drawn, ax=axes, **how)
        bar.outline.set_visible(False)
        bar.ax.tick_params(which="both", length=0, colors=self.ink.text, labelsize=SIZE - 1)
        bar.set_label(label, **self.words(fontsize=SIZE - 1, color=self.ink.faint))
        bar.minorticks_off()
        return bar


class Picture(Figure):
    """A matplotlib figure that is seen as the last line of a notebook's cell.

    A plain figure is only where pyplot was set up for that notebook, and these are made without it.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Twice as many pixels as it takes room, so that it is sharp on every screen."""
        file = io.BytesIO()
        write(self, file, ".png", SHARP)
        png = file.getvalue()
        wide, high = struct.unpack(">II", png[16:24])
        return png, {"width": wide // 2, "height": high // 2}


@contextmanager
def sheet(
    width: float, height: float, texts: Sequence[str], *, dark: bool, layout: Any = "constrained"
) -> Iterator[Sheet]:
    """A new figure of so many inches, on which some texts will stand."""
    ink = DARK if dark else LIGHT
    family, missing = families([*texts, "…"])
    with matplotlib.rc_context(SETTINGS):
        figure = Picture(figsize=(width, height), facecolor=ink.page, layout=layout)
        yield Sheet(figure, ink, family, missing)


def format_of(path: Path) -> str:
    """In which format a picture of that name is written.

    >>> format_of(Path("map.SVG"))
    '.svg'
    """
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise RegardError(
            "the format of a picture is chosen by the ending of its name",
            got=repr(path.name),
            accepted=", ".join(f"a name that ends in {kind}" for kind in FORMATS),
        )
    return kind


def save(
    figure: Figure,
    path: str | os.PathLike[str],
    dpi: int = PRINTED,
    *,
    width: float | None = None,
) -> None:
    """Write a figure to a .png, .svg or .pdf file, trimmed to what is drawn.

    `width` is that of the file in millimetres: what is drawn grows or shrinks, letters keep their
    size. Text stays text in SVG and PDF, and its fonts are in the file. The same figure gives the
    same bytes: nothing of the date or of the run is in the file.
    """
    path = path_of(path)
    kind = format_of(path)
    if width is not None and not LEAST <= width <= MOST:
        raise RegardError(
            "width= is that of the picture in millimetres",
            got=f"{width:g}",
            accepted=f"{LEAST} to {MOST}; a column of a journal is about 85",
        )
    # A picture that was there before stays until the new one is whole.
    with replacing(path) as unfinished:
        write(figure, unfinished, kind, dpi, width)


def write(
    figure: Figure,
    to: Path | io.BytesIO,
    kind: str,
    dpi: int = PRINTED,
    width: float | None = None,
) -> None:
    """Write a figure as one of FORMATS, so many millimetres wide if that is said."""
    made = io.BytesIO()
    # Of a font's tables that no reader of a PDF asks for it says on standard error that they go.
    logging.getLogger("fontTools.subset").setLevel(logging.ERROR)
    with matplotlib.rc_context(SETTINGS):
        box: Any = "tight" if width is None else _fitted(figure, width / INCH)
        figure.savefig(
            made,
            format=kind[1:],
            dpi=dpi,
            metadata=FORMATS[kind],
            bbox_inches=box,
            pad_inches=MARGIN if width is None else 0.0,
            facecolor=figure.get_facecolor(),
        )
    data = made.getvalue()
    if kind == ".svg":
        data = _with_fonts(data)
    if isinstance(to, io.BytesIO):
        to.write(data)
    else:
        to.write_bytes(data)


def _fitted(figure: Figure, wide: float) -> Bbox:
    """What to cut out of a figure, so many inches wide: it is laid out anew, larger or smaller,
    until what is drawn fills that width."""
    for _ in range(TRIES):
        # A figure is laid out when it is drawn, not before.
        figure.draw_without_rendering()
        drawn = figure.get_tightbbox()
        missing = wide - 2 * MARGIN - drawn.width
        if abs(missing) < 0.01:
            break
        size = figure.get_size_inches()
        grown = max(size[0] + missing, 0.3)
        figure.set_size_inches(grown, max(size[1] * (grown / size[0]), 0.3))
    figure.draw_without_rendering()
    drawn = figure.get_tightbbox()
    middle = (drawn.x0 + drawn.x1) / 2
    return Bbox.from_extents(
        middle - wide / 2, drawn.y0 - MARGIN, middle + wide / 2, drawn.y1 + MARGIN
    )


def _with_fonts(svg: bytes) -> bytes:
    """An SVG with the glyphs of its words in its style."""
    text = svg.decode()
    said = frozenset("".join(html.unescape(word) for word in WORDS.findall(text)))
    chosen, _ = families(said)
    rules = "".join(embedded(family, said) for family in chosen) if said else ""
    return text.replace("</style>", f"{rules}</style>", 1).encode()
