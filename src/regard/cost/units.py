"""Numbers as people write and read them, in one place.

Counts of tokens are powers of two where people say "k": 128k is 131,072 and 1M is 1,048,576, as in
the names of models. FLOPs and rates step by 1000, bytes by 1024 (KiB, MiB, GiB).
"""

from __future__ import annotations

import re

from regard.errors import RegardError

MOST = 1 << 26
"""Tokens up to which masks are counted: their edges are held in memory."""
_TIMES = {"": 1, "k": 2**10, "m": 2**20}
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}


def tokens(count: int | str, what: str = "context counts tokens") -> int:
    """A number of tokens (or of something else, if it is said of what).

    >>> tokens("128k"), tokens("1M"), tokens("1.5k"), tokens(4096), tokens("4,096")
    (131072, 1048576, 1536, 4096, 4096)
    """
    found = None if isinstance(count, bool) else re.fullmatch(
        r"(\d+(?:\.\d+)?)\s*([km]?)", str(count).replace(",", "").strip().lower()
    )  # fmt: skip
    number = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if not 1 <= number <= MOST or number != int(number):
        raise RegardError(
            what,
            got=repr(count),
            accepted="a whole number from 1 to 64M, such as 8192, 128k (131,072) or 1M (1,048,576)",
        )
    return int(number)


def width_of(dtype: str) -> int:
    """Bytes of one number.

    >>> width_of("bfloat16")
    2
    """
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise RegardError("unknown dtype", got=repr(dtype), accepted=", ".join(_BYTES))
    return _BYTES[dtype]


def counted(number: float) -> str:
    """A count or rate, in steps of 1000.

    >>> counted(999), counted(12_345), counted(1.5e15), counted(0)
    ('999', '12.3 k', '1.50 P', '0')
    """
    if number < 1000 and number == int(number):
        return f"{number:.0f}"
    return _stepped(number, 1000, ("", "k", "M", "G", "T", "P", "E"))


def sized(number: float) -> str:
    """Bytes, in steps of 1024.

    >>> sized(512), sized(131072), sized(5.25 * 2**30)
    ('512 B', '128 KiB', '5.25 GiB')
    """
    if number < 1024:
        return f"{number:.0f} B"
    return _stepped(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def timed(seconds: float) -> str:
    """A time.

    >>> timed(0.00012), timed(0.25), timed(75.0)
    ('120 µs', '250 ms', '75.0 s')
    """
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-9)} ns"


def _stepped(number: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        # What would round up to a fourth digit goes to the next unit.
        if number < step - 0.5:
            return f"{_three(number)} {unit}".rstrip()
        number /= step
    return f"{_three(number)} {units[-1]}"


def _three(number: float) -> str:
    """Three digits, more before the point where it takes them."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
