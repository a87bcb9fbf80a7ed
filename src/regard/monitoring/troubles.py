"""What goes wrong while a run is observed: told once, and never the end of the run."""

from __future__ import annotations

import traceback
import warnings
from contextlib import AbstractContextManager
from types import TracebackType

from regard.errors import RegardError, RegardWarning


class Troubles:
    """Errors of an observer. With `raises` they end the run as any error does; else they wait here
    until `tell` warns of them, of each kind once."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.fresh = False
        """Whether something went wrong since the last `tell`, told before or not."""
        self._waiting: list[str] = []
        self._noted: set[str] = set()

    def during(self, what: str, whose: str = "") -> AbstractContextManager[None]:
        """Errors in here are noted, and what follows goes on. Those of somebody (`whose`) are of
        one kind if they are of one type: what others say may be new each time."""
        return _During(self, what, whose)

    def note(self, what: str, error: Exception, whose: str = "") -> None:
        """Keep the words of an error; its frames would keep tensors alive."""
        self.fresh = True
        name = type(error).__name__
        words = f"{name}: {_said(error)}"
        if not isinstance(error, RegardError):
            where = traceback.extract_tb(error.__traceback__)[-1]
            words += f"\n  at:       {where.filename}:{where.lineno}, in {where.name}"
        self.remark(
            f"{what}: {whose} {name if whose else words.partition(chr(10))[0]}",
            f'the monitor failed while {what}; training goes on (on_error="raise" would end it)\n'
            f"  {words}",
        )

    def remark(self, kind: str, text: str) -> None:
        """Something to be told, if nothing of its kind was."""
        if kind not in self._noted:
            self._noted.add(kind)
            self._waiting.append(text)

    def tell(self, stacklevel: int) -> None:
        waiting, self._waiting, self.fresh = self._waiting, [], False
        for text in waiting:
            warnings.warn(RegardWarning(text), stacklevel=stacklevel + 1)


class _During(AbstractContextManager[None]):
    """What `Troubles.during` gives. (Generators make contexts that take longer: this is gone
    through at every layer.)"""

    def __init__(self, troubles: Troubles, what: str, whose: str) -> None:
        self._troubles, self._what, self._whose = troubles, what, whose

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or self._troubles.raises:
            return False
        self._troubles.note(self._what, error, self._whose)
        return True


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "(it does not say what it is)"
