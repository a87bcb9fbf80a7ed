"""Cells of tables that need no room to wrap: numbers and single words. The style sheet keeps them
on one line, and gives the others a width in which sentences can be read.
"""

from __future__ import annotations

from typing import Any


def is_short(text: str) -> bool:
    """Whether a cell stays on one line.

    >>> is_short("4.07e+03"), is_short("32/8 × 128, 16 × 16k")
    (True, False)
    """
    return len(text) <= 12


def mark(_app: Any, page: Any) -> None:
    """For Sphinx: gives short cells a class of their own."""
    from docutils import nodes

    for cell in page.findall(nodes.entry):
        if is_short(cell.astext()):
            cell["classes"].append("short")


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
