"""Who computes next: what somebody waits for goes before what is only made ready."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock of two classes. Who is urgent goes before all who are not, whoever came first.

    >>> turns = Turns()
    >>> with turns.taken(urgent=True):
    ...     turns.busy
    True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.busy = False
        self._urgent = 0
        """Urgent ones that wait."""

    @property
    def wanted(self) -> bool:
        """Whether somebody urgent waits."""
        return self._urgent > 0

    def take(self, *, urgent: bool) -> None:
        """Wait for a turn."""
        with self._changed:
            self._urgent += urgent
            try:
                while self.busy or (self._urgent and not urgent):
                    self._changed.wait()
            finally:
                self._urgent -= urgent
            self.busy = True

    def give(self) -> None:
        """End a turn."""
        with self._changed:
            self.busy = False
            self._changed.notify_all()

    @contextmanager
    def taken(self, *, urgent: bool) -> Iterator[None]:
        """A turn for as long as this lasts."""
        self.take(urgent=urgent)
        try:
            yield
        finally:
            self.give()
