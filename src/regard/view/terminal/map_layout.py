"""What of a heat map fits into a width: the columns to show, or how far to pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regard.view.atlas import CAP

LABEL, SHORT = 14, 8
WORDS, WIDE = 12, 70
"""How much of a pooled row's text stands beside it, and how wide a console has room for that."""
ENTROPY = len("  entropy")
SHARE = len(" 100%")


@dataclass(frozen=True)
class Layout:
    """The measures of one heat map, in cells of the terminal.

    >>> Layout(cell=3, label=8, rows=4, columns=4, entropy=True, strongest=8).width
    45
    """

    cell: int
    label: int
    rows: int
    columns: int
    entropy: bool = False
    strongest: int = 0
    pooled: bool = False

    @property
    def width(self) -> int:
        strongest = 2 + self.strongest + SHARE if self.strongest else 0
        return self.label + 1 + self.columns * self.cell + ENTROPY * self.entropy + strongest


def lay_out(width: int, queries: int, keys: int, label: int, *, plain: bool) -> Layout:
    """The fullest layout that fits: one cell per weight if it can be, else pooled.

    >>> lay_out(80, 14, 14, 9, plain=False).width
    77
    >>> lay_out(80, 1000, 1000, 9, plain=False)
    Layout(cell=2, label=21, rows=24, columns=24, entropy=True, strongest=0, pooled=True)
    """
    if max(queries, keys) <= CAP:
        for layout in _unpooled(queries, keys, label, plain=plain):
            if layout.width <= width:
                return layout
    label = max(len("received"), 2 * len(str(max(queries, keys))) + 1)
    label += WORDS if width >= WIDE else 0
    entropy = width >= label + 1 + ENTROPY + 40
    cells = max(1, min(CAP, (width - label - 1 - ENTROPY * entropy) // 2))
    return Layout(2, label, min(queries, cells), min(keys, cells), entropy, pooled=True)


def _unpooled(queries: int, keys: int, longest: int, *, plain: bool) -> Iterator[Layout]:
    """Layouts from the fullest to the barest. Colour can spare its numbers; plain text cannot."""
    label, short = min(longest, LABEL), min(longest, SHORT)
    full = [(label, True, label), (short, True, short)]
    bare = [(short, True, 0), (short, False, 0)]
    stages = [(3, full), (3, bare)] if plain else [(3, full)]
    for cell, columns in [*stages, (2, full), (2, bare), (1, full), (1, bare)]:
        for name, entropy, strongest in columns:
            yield Layout(cell, name, queries, keys, entropy, strongest)
