"""What goes wrong while a run is observed: told once, and never the end of the run."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def during(self, what: str, whose: str = "") -> Iterator[None]:
        """Errors in here are noted, and what follows goes on. Those of somebody (`whose`) are of
        one kind if they are of one type: what others say may be new each time."""
        try:
            yield
        except Exception as error:
            if self.raises:
                raise
            self.note(what, error, whose)

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


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "(it does not say what it is)"
