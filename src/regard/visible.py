"""Text from elsewhere, on its way to a terminal.

A name in a file, a layer's path or a folder's may hold characters that a terminal obeys: they move
the cursor, colour or hide what stands beside them, or turn the line around.
"""

from __future__ import annotations

import unicodedata

COMMANDS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Kinds of characters that are no sign on paper."""


def visible(text: str) -> str:
    r"""A text in which every character shows: others are spelled out. Lines stay lines.

    >>> visible("\x1b[31mred\x07 \u202eder\nkept"), visible("漢字 é")
    ('\\x1b[31mred\\x07 \\u202eder\nkept', '漢字 é')
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(s if s == "\n" or shows(s) else ascii(s)[1:-1] for s in text)


def shows(sign: str) -> bool:
    """Whether a character is one that is seen, or a space."""
    return unicodedata.category(sign) not in COMMANDS
