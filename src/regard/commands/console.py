"""What commands print on, and how they show how far they are."""

from __future__ import annotations

import sys
import time
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
    return PlainConsole()


def progress_bar() -> Progress:
    """Progress on standard error, gone when the work is done."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not at_terminal(),
    )  # fmt: skip


class ProgressLines:
    """Progress where standard error is no terminal, as in a pipe or a log: a line now and then,
    with how long it took and about how long it still takes."""

    def __init__(self, every: float = 15.0, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._began = self._told = now()
        self._first: tuple[float, int] | None = None
        self._silent = sys.stderr is None or at_terminal()

    def tell(self, what: str, done: int, total: int) -> None:
        """So much of all is done."""
        now = self._now()
        # What comes before the first step, such as reading a text, says nothing of the others.
        first, already = self._first = self._first or (now, done)
        if self._silent or now - self._told < self._every or not already < done < total:
            return
        self._told, took = now, now - self._began
        left = (now - first) * (total - done) / (done - already)
        print(
            f"{what}: {done / total:.0%} after {took:.0f} s, about {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def shown_on(bar: Progress, task: TaskID) -> Callable[[str, int, int], None]:
    """What is being done and how far, on a bar; it runs to and fro where the whole is not known."""

    def tell(doing: str, done: int, total: int) -> None:
        if total:
            bar.update(task, description=doing, completed=done, total=total)
        elif doing != bar.tasks[bar.task_ids.index(task)].description:
            # A total that was told stays, unless the bar begins anew.
            bar.reset(task, description=doing, total=None)

    return tell
