"""Fonts for any script: families that are installed here, and what none of them can write."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from functools import cache

from matplotlib import font_manager

FIRST = "DejaVu Sans"
"""Comes with matplotlib, so that pictures look alike everywhere."""

# Families that carry other scripts on the systems people use. Fonts of coloured pictures (Noto
# Color Emoji, Apple Color Emoji) are left out: they cannot be drawn as outlines.
OTHERS = (
    "Noto Sans CJK", "Noto Sans", "Noto Emoji", "Source Han Sans", "Hiragino Sans", "PingFang",
    "Apple SD Gothic Neo", "Arial Unicode MS", "Apple Symbols", "Yu Gothic", "Meiryo", "MS Gothic",
    "Malgun Gothic", "Microsoft YaHei", "SimHei", "Segoe UI Symbol", "Segoe UI Emoji", "Nirmala UI",
    "Leelawadee UI", "WenQuanYi", "Droid Sans Fallback", "FreeSans", "Symbola", "Unifont",
)  # fmt: skip


def families(texts: Iterable[str]) -> tuple[list[str], set[str]]:
    """Families that write some texts between them, and the characters that none can write.

    >>> families(["any words"])
    (['DejaVu Sans'], set())
    """
    left = {ord(sign) for text in texts for sign in text} - _signs(FIRST)
    chosen = [FIRST]
    for name in _installed() if left else ():
        if left & _signs(name):
            chosen.append(name)
            left -= _signs(name)
    return chosen, set(map(chr, left))


def written(text: str, missing: set[str]) -> str:
    r"""A text with the characters that no font has spelled out.

    >>> written("a🙂", {"🙂"})
    'a\\U0001f642'
    """
    return "".join(ascii(sign)[1:-1] if sign in missing else sign for sign in text)


@cache
def embedded(family: str, signs: frozenset[str]) -> str:
    """The glyphs of some characters, as a rule for the style of an SVG: it looks the same where the
    family is not installed."""
    # Imported late: only who writes an SVG waits for it. Matplotlib brings it along.
    from fontTools.subset import Options, Subsetter  # type: ignore[import-untyped]
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    path = font_manager.findfont(family, fallback_to_default=False)
    font = TTFont(path, fontNumber=0, recalcTimestamp=False)
    cut = Subsetter(Options(notdef_outline=True, layout_features=[], hinting=False))
    cut.populate(text="".join(sorted(signs)))
    cut.subset(font)
    file = io.BytesIO()
    font.save(file)
    data = base64.b64encode(file.getvalue()).decode()
    return f"@font-face{{font-family:'{family}';src:url(data:font/ttf;base64,{data})}}"


@cache
def _installed() -> tuple[str, ...]:
    """The families of OTHERS that are installed, in that order."""
    there = sorted({entry.name for entry in font_manager.fontManager.ttflist})
    found = [name for prefix in OTHERS for name in there if name.startswith(prefix)]
    return tuple(dict.fromkeys(found))


@cache
def _signs(family: str) -> frozenset[int]:
    """The characters that a family has glyphs for."""
    path = font_manager.findfont(family, fallback_to_default=False)
    return frozenset(font_manager.get_font(path).get_charmap())
