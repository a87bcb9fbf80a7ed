"""What commands print on, and how they show how far they are."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from regard.notices import at_terminal
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
        console=Console(stderr=True), transient=True, disable=not at_terminal(),
    )  # fmt: skip


def shown_on(bar: Progress, task: TaskID) -> Callable[[str, int, int], None]:
    """What is being done and how far, on a bar; it runs to and fro where the whole is not known."""

    def tell(doing: str, done: int, total: int) -> None:
        bar.update(task, description=doing, completed=done, total=total or None)

    return tell
