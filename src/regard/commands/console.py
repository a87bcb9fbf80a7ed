"""What commands print on, and how they show how far they are."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from regard.view.terminal import PlainConsole


def plain_console() -> Console:
    """Standard output, as text."""
    # A terminal that cannot encode a character shows a question mark, not a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return PlainConsole()


def progress_bar() -> Progress:
    """Progress on standard error, gone when the work is done."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
