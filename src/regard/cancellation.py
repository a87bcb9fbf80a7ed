"""Long work that somebody may stop: between two steps it asks whether it is still wanted.

Who starts the work says how that is known; the loops that take long say where a step ends. Neither
knows the other, and work that nobody can stop pays for looking up one variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Check = Callable[[], None]
"""Raises if the work is no longer wanted."""


class UnwantedError(Exception):
    """Work that nobody waits for any more. Whoever explains what goes wrong lets it pass."""


Far = Callable[[int, int], None]
"""Told how many steps are done, of how many."""

_check: ContextVar[Check | None] = ContextVar("regard.cancellation", default=None)
_far: ContextVar[Far | None] = ContextVar("regard.telling", default=None)


def step(done: int = 0, total: int = 0) -> None:
    """The end of a step: raises what the one who may stop this work raises, if they did. Where the
    work knows how far it is, whoever asked is told."""
    check = _check.get()
    if check is not None:
        check()
    far = _far.get() if total else None
    if far is not None:
        far(done, total)


@contextmanager
def telling(far: Far) -> Iterator[None]:
    """What this thread does inside tells how far it is, where it knows.

    >>> with telling(lambda done, total: print(f"{done} of {total}")):
    ...     step(1, 2)
    1 of 2
    """
    token = _far.set(far)
    try:
        yield
    finally:
        _far.reset(token)


@contextmanager
def stoppable(check: Check) -> Iterator[None]:
    """What this thread does inside ends at its next step once `check` raises.

    >>> def unwanted() -> None:
    ...     raise TimeoutError("nobody waits any more")
    >>> with stoppable(unwanted):
    ...     step()
    Traceback (most recent call last):
    TimeoutError: nobody waits any more
    >>> step()
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)
