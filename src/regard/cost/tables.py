"""Tables as text, 80 columns wide, and as HTML."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from regard.display import table_html
from regard.visible import visible

WIDTH = 80


class Block(NamedTuple):
    """Some rows that belong together; a rule stands before some of them."""

    rows: list[list[str]]
    rules: tuple[int, ...] = ()
    words: bool = False
    """Whether cells are words, which stand to the left; numbers stand to the right."""


def table(rows: list[list[str]], *, rules: tuple[int, ...] = ()) -> str:
    """Columns: the first to the left, numbers to the right. A rule stands before some rows.

    >>> print(table([["", "a"], ["b", "10"]], rules=(1,)))
          a
    ───────
      b  10
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for at, row in enumerate(rows):
        if at in rules:
            lines.append("─" * (2 + sum(widths) + 2 * (len(widths) - 1)))
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def as_text(title: str, blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """A title, some blocks and the notes to them, as text."""
    head = textwrap.fill(title, WIDTH, subsequent_indent="  ", break_long_words=False)
    body = [_aside(b) if b.words else table(b.rows, rules=b.rules) for b in blocks]
    foot = "\n".join(textwrap.fill(note, WIDTH) for note in notes)
    # A configuration's name is that of a folder.
    return visible("\n\n".join([head, *body, foot]))


def as_html(title: str, blocks: Sequence[Block], notes: Sequence[str]) -> str:
    """The same as tables of HTML."""
    first, *others = blocks
    tables = [table_html(first.rows, header=True, numbers=True, title=title)]
    tables += [table_html(b.rows, header=bool(b.rules), numbers=not b.words) for b in others]
    return "\n".join([*tables, *(f"<p>{html.escape(note)}</p>" for note in notes)])


def _aside(block: Block) -> str:
    """Labels, and words beside them; the first row is the heading."""
    width = max(len(label) for label, _ in block.rows)
    lines = [f"  {label:<{width}}  {text}" for label, text in block.rows]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])
