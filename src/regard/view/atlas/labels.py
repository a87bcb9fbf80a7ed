"""Tokens as labels: nothing in them reaches the terminal but what it can show in known cells."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from regard.visible import shows

# Joiners and variation selectors change how wide a terminal draws the characters beside them.
SILENT = {"\u200d", "\u200c", *map(chr, range(0xFE00, 0xFE10))}
# Ends a run that is written from right to left, so that what stands beside it stays there.
LEFT_TO_RIGHT = "\u200e"


def clean(token: str) -> str:
    r"""A token with everything that is no visible character spelled out.

    The space that a word begins with is left out; a token of nothing but spaces shows them. A mark
    that would combine with what stands before the token is given a circle to stand on.

    >>> clean("\x1b[31mred\n"), clean(" word"), clean("  "), clean("\u0301")
    ('\\x1b[31mred\\n', 'word', '␣␣', '◌́')
    """
    kept = "".join(s for s in unicodedata.normalize("NFC", token) if s not in SILENT)
    label = "".join(sign if _plain(sign) else _escaped(sign) for sign in kept)
    if label.isspace():
        return "␣" * len(label)
    label = label.removeprefix(" ")
    return f"◌{label}" if label and unicodedata.category(label[0])[0] == "M" else label


def fit(label: str, width: int, mark: str = "…") -> str:
    """A label in exactly so many cells: padded, or cut with a mark.

    >>> fit("read", 6), fit("attention", 6), fit("漢字漢字", 6)
    ('read  ', 'atten…', '漢字 …')
    """
    if cell_len(label) <= width:
        return held(label) + " " * (width - cell_len(label))
    return held(set_cell_size(label, max(width - 1, 0))) + mark[:width]


def stack(labels: Sequence[str], cell: int, height: int, mark: str = "⋮") -> list[str]:
    """Labels written downwards, one above each column of `cell` cells, standing on their end.

    >>> for line in stack(["to", "read"], 2, 4): print(repr(line))
    '   r'
    '   e'
    ' t a'
    ' o d'
    """
    towers = [_glyphs(label) for label in labels]
    towers = [t if len(t) <= height else [*t[: height - 1], mark] for t in towers]
    tallest = max(map(len, towers), default=0)
    towers = [[""] * (tallest - len(t)) + t for t in towers]
    return ["".join(centre(t[row], cell) for t in towers) for row in range(tallest)]


def _glyphs(label: str) -> list[str]:
    """Characters, each with the marks that combine with it."""
    found: list[str] = []
    for sign in label:
        if found and cell_len(sign) == 0:
            found[-1] += sign
        else:
            found.append(sign)
    return found


def centre(text: str, width: int) -> str:
    """A short text in the middle of so many cells.

    >>> centre("to", 5), centre("漢", 5)
    ('  to ', '  漢 ')
    """
    if cell_len(text) > width:
        return held(set_cell_size(text, width))
    left = (width - cell_len(text) + 1) // 2
    return " " * left + held(text) + " " * (width - cell_len(text) - left)


def held(text: str) -> str:
    """A text after which the line goes on from left to right, whichever way the text is written.

    >>> held("read"), held("קרא").encode("unicode_escape")
    ('read', b'\\\\u05e7\\\\u05e8\\\\u05d0\\\\u200e')
    """
    turns = any(unicodedata.bidirectional(sign) in {"R", "AL", "AN"} for sign in text)
    return text + LEFT_TO_RIGHT if turns else text


def _plain(sign: str) -> bool:
    return sign == " " or (shows(sign) and unicodedata.category(sign) != "Zs")


def _escaped(sign: str) -> str:
    return " " if unicodedata.category(sign) == "Zs" else ascii(sign)[1:-1]
