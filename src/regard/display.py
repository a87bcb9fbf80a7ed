"""How a value shows itself as the last line of a notebook's cell."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any


class Displayed:
    """A value that a notebook may ask to show itself. The view does it, and is not imported before.

    >>> import regard, torch
    >>> x = torch.randn(1, 2, 5, 4)
    >>> regard.trace(x, x, x)._repr_mimebundle_()["text/plain"]
    'Trace(batch 1, heads 2, queries 5, keys 5, width 4, float32 on cpu, by tiled)'
    """

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """What Jupyter, VS Code and Colab ask for."""
        from regard.view.web.notebook import bundle

        return bundle(self)

    def _display_(self) -> object:
        """What marimo asks for."""
        from regard.view.web.notebook import shown

        found = shown(self)
        return repr(self) if found is self else found


def table_text(rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Rows of text as a table of plain text, for a `__repr__`; `notes` are said below it.

    The first cell of a row names it; the others stand to the right, as numbers do.

    >>> print(table_text([["head", "share"], ["4.5", "58 %"]], ["of 3 texts"]))
    head  share
    4.5    58 %
    of 3 texts
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *notes])


def table_html(
    rows: Sequence[Sequence[str]],
    *,
    header: bool = False,
    numbers: bool = False,
    title: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Rows of text as a table of HTML, for the `_repr_html_` of a value. Nothing in it is markup.

    The first cell of a row names it, and with `header` the first row names the columns; `numbers`
    stand to the right. `title` is said above the table, `notes` below it.

    >>> print(table_html([["backend", "tiled"]], title="q <- k"))
    <p><b>q &lt;- k</b></p>
    <table>
    <tr><th style="text-align:left">backend</th><td style="text-align:left">tiled</td></tr>
    </table>
    """
    aside = "right" if numbers else "left"
    lines = [f"<p><b>{html.escape(title)}</b></p>"] if title else []
    lines.append("<table>")
    for at, row in enumerate(rows):
        kinds = ["th", *(["th" if header and not at else "td"] * (len(row) - 1))]
        sides = ["left", *([aside] * (len(row) - 1))]
        cells = (
            f'<{kind} style="text-align:{side}">{html.escape(cell)}</{kind}>'
            for kind, side, cell in zip(kinds, sides, row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</table>")
    lines += [f"<p>{html.escape(note)}</p>" for note in notes]
    return "\n".join(lines)
