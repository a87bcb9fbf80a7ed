"""A one-line notice at a terminal; nothing is written to a pipe or a file."""

from __future__ import annotations

import sys
from contextlib import suppress


def at_terminal() -> bool:
    """Whether standard error is a terminal. It may have been closed, or replaced by anything."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError, OSError):
        return False


def notice(line: str) -> None:
    """Explain a wait of several seconds before it begins."""
    if at_terminal():
        # A terminal that has gone must not end what is waited for.
        with suppress(OSError, ValueError):
            print(f"regard: {line}", file=sys.stderr, flush=True)
