"""The run of a model that a watch follows: one at a time, in one thread."""

from __future__ import annotations

import threading
from contextvars import ContextVar

from regard.errors import RegardError


class FollowedRun:
    """Which modules are running, and in which thread."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        """Those of the modules that are running, the innermost last."""
        self.thread: int | None = None
        """Where they run."""
        self.everywhere = True
        """Whether runs count that somebody else makes, in another thread or task."""
        self.elsewhere = 0
        """How many runs were not followed."""
        self._claiming = threading.Lock()
        self._aside: dict[int, int] = {}
        """How many modules run in threads whose runs are not followed: no part of those is."""

    def expect_here(self) -> None:
        """This thread or task is one whose runs count."""
        _HERE.set((*_HERE.get(), self))

    def leave_here(self) -> None:
        """It is not any more, if it was."""
        _HERE.set(tuple(run for run in _HERE.get() if run is not self))

    def is_here(self) -> bool:
        """Whether the run that is followed is one of this thread."""
        return self.thread == threading.get_ident()

    def depth(self) -> int:
        """How many modules are running in this thread."""
        here = threading.get_ident()
        return len(self.paths) if self.thread == here else self._aside.get(here, 0)

    def enter(self, path: str, again: bool) -> bool:
        """A module begins to run, or does so `again`. Whether it is a part of the run."""
        here = threading.get_ident()
        if self.thread != here and (here in self._aside or not self._claim(again)):
            self._aside[here] = self._aside.get(here, 0) + 1
            return False
        self.paths.append(path)
        return True

    def leave_aside(self, depth: int) -> None:
        """So many modules still run in this thread, whose run is not followed."""
        if depth:
            self._aside[threading.get_ident()] = depth
        else:
            self._aside.pop(threading.get_ident(), None)

    def refuse_elsewhere(self, model: str) -> None:
        """A model of which no run was followed must not have run elsewhere."""
        if self.elsewhere:
            raise RegardError(
                "the model ran, but in other threads or tasks than the one that watches",
                got=f"{model}, run {self.elsewhere} times elsewhere",
                do="watch in the thread that runs it, or use attach() and detach() instead of "
                "with: they see the runs of all threads, one at a time",
            )

    def _claim(self, again: bool) -> bool:
        """Whether the run that begins in this thread is one to follow."""
        if not (again or self.everywhere or any(run is self for run in _HERE.get())):
            self.elsewhere += 1
            return False
        with self._claiming:
            if self.thread is None:
                self.thread = threading.get_ident()
                return True
        self.elsewhere += 1
        return False


_HERE: ContextVar[tuple[FollowedRun, ...]] = ContextVar("here", default=())
"""The runs of the watches whose `with` this thread or task is in."""
