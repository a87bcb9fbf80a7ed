"""Ctrl-C at a moment that nobody chose: a real signal to this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_due = False


@contextmanager
def listening() -> Iterator[None]:
    """Interrupts reach what is run by `interrupted`, and nothing else."""
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted(work: Callable[[], Any], after: float) -> bool:
    """Run something, and interrupt it after so many seconds. Whether it was still running, and let
    the interrupt through to who called it."""
    global _due
    stop = threading.Event()
    sender = threading.Thread(target=_send, args=(after, stop))
    sender.start()
    try:
        _due = True
        work()
        _due = False
        return False
    except KeyboardInterrupt:
        return True
    finally:
        _due = False
        stop.set()
        sender.join()


def _send(after: float, stop: threading.Event) -> None:
    if not stop.wait(after):
        os.kill(os.getpid(), signal.SIGINT)


def _interrupt(*_: object) -> None:
    global _due
    if _due:
        _due = False
        raise KeyboardInterrupt
