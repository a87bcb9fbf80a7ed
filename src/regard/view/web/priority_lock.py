"""A lock that lets requests run before work that is only prepared ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PriorityLock:
    """A lock with two priorities. Urgent work waits only for urgent work: other work continues
    beside it until its next step, and no further while urgent work waits or runs.

    >>> turns = PriorityLock()
    >>> turns.take(urgent=False)
    >>> with turns.taken(urgent=True):
    ...     turns.busy, turns.wanted
    (True, True)
    >>> turns.give(urgent=False)
    >>> turns.busy
    False
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urgent_runs = self._other_runs = False
        self._urgent = 0
        """Urgent ones that wait."""

    @property
    def busy(self) -> bool:
        """Whether any work runs."""
        return self._urgent_runs or self._other_runs

    @property
    def wanted(self) -> bool:
        """Whether urgent work waits or runs."""
        return self._urgent > 0 or self._urgent_runs

    def take(self, *, urgent: bool) -> None:
        """Wait for a turn."""
        with self._changed:
            if urgent:
                self._urgent += 1
                try:
                    self._changed.wait_for(lambda: not self._urgent_runs)
                finally:
                    self._urgent -= 1
                self._urgent_runs = True
            else:
                self._changed.wait_for(lambda: not self._other_runs and not self.wanted)
                self._other_runs = True

    def give(self, *, urgent: bool) -> None:
        """End a turn."""
        with self._changed:
            if urgent:
                self._urgent_runs = False
            else:
                self._other_runs = False
            self._changed.notify_all()

    @contextmanager
    def rested(self, *, urgent: bool) -> Iterator[None]:
        """Others of the same priority may run meanwhile; work that is not urgent does not continue
        while urgent work rests."""
        with self._changed:
            self._urgent += urgent
        self.give(urgent=urgent)
        try:
            yield
        finally:
            self.take(urgent=urgent)
            with self._changed:
                self._urgent -= urgent

    @contextmanager
    def taken(self, *, urgent: bool) -> Iterator[None]:
        """A turn for as long as this lasts."""
        self.take(urgent=urgent)
        try:
            yield
        finally:
            self.give(urgent=urgent)
