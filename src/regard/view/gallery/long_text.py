"""A text of ten thousand words that repeats itself in tens, hundreds and thousands."""

from __future__ import annotations

SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = (
    "zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)  # fmt: skip
LAST = 1860


def counted(last: int = LAST) -> str:
    """All numbers from one on, in words.

    >>> counted(3)
    'one two three'
    """
    return " ".join(map(in_words, range(1, last + 1)))


def in_words(n: int) -> str:
    """A number below a million.

    >>> in_words(21), in_words(300), in_words(1107)
    ('twenty one', 'three hundred', 'one thousand one hundred and seven')
    """
    if n < 20:
        return SMALL[n]
    if n < 100:
        return _joined(TENS[n // 10], " ", n % 10)
    if n < 1000:
        return _joined(f"{SMALL[n // 100]} hundred", " and ", n % 100)
    between = " and " if n % 1000 < 100 else " "
    return _joined(f"{in_words(n // 1000)} thousand", between, n % 1000)


def _joined(large: str, between: str, rest: int) -> str:
    return f"{large}{between}{in_words(rest)}" if rest else large
