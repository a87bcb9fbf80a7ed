"""Long work that can be cancelled: between two steps it checks whether it is still wanted. The
caller gives the check; long loops mark where a step ends. Neither knows the other, and work without
a check pays for looking up one variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Check = Callable[[], None]
"""Raises if the work is no longer wanted."""


class UnwantedError(Exception):
    """Work that is no longer wanted. Handlers that explain errors let it pass."""


Far = Callable[[int, int], None]
"""Called with the number of steps done, and of all."""

_check: ContextVar[Check | None] = ContextVar("regard.cancellation", default=None)
_far: ContextVar[Far | None] = ContextVar("regard.telling", default=None)


def step(done: int = 0, total: int = 0) -> None:
    """The end of a step: raises if the work is cancelled, and reports progress where it is
    known."""
    check = _check.get()
    if check is not None:
        check()
    far = _far.get() if total else None
    if far is not None:
        far(done, total)


@contextmanager
def telling(far: Far) -> Iterator[None]:
    """Work of this thread inside the block reports its progress, where it is known.

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
    """Work of this thread inside the block ends at its next step once `check` raises.

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
