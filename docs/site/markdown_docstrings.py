"""Docstrings are written as they are read: plain text, `code`, lists and examples. This makes
reStructuredText of them, the language of Sphinx's autodoc.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

CODE = re.compile(r"`([^`]+)`")
SIGNS = re.compile(r"([\\*|_])")


def markup(text: str) -> str:
    """Code in two backticks, and no sign that would mean something else.

    >>> print(markup("`a*b` or *bh"))
    ``a*b``\\  or \\*bh
    """
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        parts[i] = f"``{part}``\\ " if i % 2 else SIGNS.sub(r"\\\1", part)
    return "".join(parts)


def in_example(lines: list[str]) -> list[bool]:
    """Which lines are an example: from one that begins with >>> to an empty one."""
    found: list[bool] = []
    for line in lines:
        begins = line.lstrip().startswith(">>>")
        found.append(bool(line.strip()) and (begins or (bool(found) and found[-1])))
    return found


def converted(lines: list[str]) -> list[str]:
    """The lines of a docstring: examples as they are, between empty lines; the rest as text."""
    found: list[str] = []
    pairs = zip(in_example(lines), lines, strict=True)
    for example, group in groupby(pairs, key=lambda pair: pair[0]):
        text = "\n".join(line for _, line in group)
        found += ["", *(text if example else markup(text)).split("\n"), ""]
    return found


def convert(_app: Any, what: str, _name: str, _it: Any, _options: Any, lines: list[str]) -> None:
    """For autodoc. The page of a module has its own words about it."""
    lines[:] = [] if what == "module" else converted(lines)


def sign(
    _app: Any,
    _what: str,
    _name: str,
    _it: Any,
    _options: Any,
    signature: str | None,
    gives: str | None,
) -> tuple[str | None, str | None]:
    """For autodoc: a default that is made anew for each is written as one that Python can read."""
    return signature and signature.replace("<factory>", "..."), gives


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-process-signature", sign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
