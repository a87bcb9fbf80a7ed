"""Where words stand among the tokens of a text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.errors import RegardError
from regard.watching.tokens import PART

Word = str | tuple[str, int] | int | Sequence[int]
"""A word; a word and which of its occurrences, from 1; the place of a token; or several places."""


class Found(NamedTuple):
    """The tokens of a word, and how often the word stands in the text."""

    places: list[int]
    times: int


def places_of(word: Any, tokens: Sequence[str] | None, length: int) -> Found:
    """The tokens that a word is made of, in a text; none where it is absent.

    >>> places_of("animal", ["<s>", "The", " ani", "mal", " and", " an", " animal"], 7)
    Found(places=[2, 3], times=2)
    >>> places_of(("animal", 2), ["<s>", "The", " ani", "mal", " and", " an", " animal"], 7).places
    [6]

    Parts of a character stand before the token that ends it, and are tokens of its word:

    >>> places_of("é", ["a", " ", "⋯", "é", "."], 5).places
    [2, 3]
    """
    if isinstance(word, int) and not isinstance(word, bool):
        return Found([_place(word, length)], 1)
    named = isinstance(word, (tuple, list)) and len(word) == 2 and isinstance(word[0], str)
    if not isinstance(word, str) and not named:
        try:
            return Found([_place(int(place), length) for place in word], 1)
        except (TypeError, ValueError):
            raise _unclear(word) from None
    text, nth = (word[0], word[1]) if not isinstance(word, str) else (word, 1)
    if tokens is None:
        raise RegardError(
            "words are looked for in texts",
            got=f"{text!r}, and tokens without their spelling",
            accepted="places of tokens",
            do="give a model opened by regard.models.load, and strings",
        )
    if not text or not isinstance(nth, int) or nth < 1:
        raise _unclear(word)
    starts, whole = [], ""
    for token in tokens:
        starts.append(len(whole))
        whole += "" if token == PART and PART not in text else token
    pattern = rf"(?<!\w){re.escape(text.strip())}(?!\w)"
    spans = [match.span() for match in re.finditer(pattern, whole)]
    if len(spans) < nth:
        return Found([], len(spans))
    begin, end = spans[nth - 1]
    ends = [*starts[1:], len(whole)]
    inside = [
        i
        for i, (a, b) in enumerate(zip(starts, ends, strict=True))
        if a < end and (b > begin or a == b == begin)
    ]
    return Found(inside, len(spans))


def _place(place: int, length: int) -> int:
    if not -length <= place < length:
        raise RegardError(
            "there is no such place", got=str(place), accepted=f"{-length} to {length - 1}"
        )
    return place % length


def _unclear(word: Any) -> RegardError:
    return RegardError(
        "a link is between words, or places of tokens",
        got=repr(word)[:60],
        accepted='"it"; ("it", 2) for the second time it stands there; 7; or [7, 8]',
    )
