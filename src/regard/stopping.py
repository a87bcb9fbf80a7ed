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


_check: ContextVar[Check | None] = ContextVar("regard.stopping", default=None)


def step() -> None:
    """The end of a step: raises what the one who may stop this work raises, if they did."""
    check = _check.get()
    if check is not None:
        check()


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
