"""One piece of work at a time, in a thread of its own: how far it is, and how it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from regard.cancellation import UnwantedError, stoppable
from regard.errors import RegardError
from regard.view.subjects import Tell

logger = logging.getLogger(__name__)


class StoppedError(UnwantedError):
    """The work was stopped."""


class Work:
    """The current background work. An exception is kept, and reported on request.

    >>> work = Work()
    >>> work.start(lambda tell: tell("reading", 1, 2))
    >>> work.wait()
    True
    >>> work.state()["state"]
    'done'
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._state: dict[str, Any] = {"state": "idle", "doing": "", "done": 0, "total": 0}
        self._about: dict[str, Any] = {"number": 0}

    def start(self, job: Callable[[Tell], None], **about: Any) -> None:
        """Begin, or the reason why not: something else is being done. What is said about it is in
        its state, with a number that no other work has."""
        with self._lock:
            # A thread that has told how its work ended may take a while to end itself.
            if not self.wait(0) and self._state["state"] == "running":
                raise RegardError(
                    "another text is being read",
                    accepted="one at a time",
                    do="wait for it, or stop it first",
                )
            self._stopping.clear()
            self._about = {"number": self._about["number"] + 1, **about}
            self._state = {"state": "running", "doing": "beginning", "done": 0, "total": 0}
            self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ask the work to end. It does at its next step: see `regard.cancellation`."""
        self._stopping.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Until the work has ended; whether it has."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def state(self) -> dict[str, Any]:
        """How far it is: running, done, stopped or failed, and then why."""
        state = self._state | self._about
        return state | {"stopping": state["state"] == "running" and self._stopping.is_set()}

    def _check(self) -> None:
        if self._stopping.is_set():
            raise StoppedError

    def _report(self, doing: str, done: int, total: int) -> None:
        self._check()
        self._state = {"state": "running", "doing": doing, "done": done, "total": total}

    def _run(self, job: Callable[[Tell], None]) -> None:
        try:
            with stoppable(self._check):
                job(self._report)
        except StoppedError:
            self._state = self._state | {"state": "stopped"}
        except RegardError as error:
            self._state = self._state | {"state": "failed", "error": str(error)}
        except Exception as error:
            # An error of a model is shown in the page and logged; the app continues.
            logger.exception("the model could not read this")
            why = f"the model could not read this\n  got:      {type(error).__name__}: {error}"
            self._state = self._state | {"state": "failed", "error": why[:2000]}
        else:
            self._state = self._state | {"state": "done"}
