"""The open connections of the app: how many there may be, how long each may keep it waiting, and
how all of them end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MOST = 64
"""Open at once, at most; a browser opens six."""
SILENT = 20.0
"""Seconds until a request has come whole, from its first moment or the answer before: its headers,
and its body."""
SLOW = 120.0
"""Seconds until an answer has been taken."""


@dataclass(eq=False)
class Connection:
    """One client, and until when the app waits for it; None while it is the client that waits."""

    socket: socket.socket
    until: float | None = None
    is_idle: bool = True
    """Whether no whole request has come yet."""

    def expect(self, seconds: float | None, *, is_idle: bool = False) -> None:
        """Wait so long for the client, and no longer."""
        self.until = None if seconds is None else time.monotonic() + seconds
        self.is_idle = is_idle

    def cut(self) -> None:
        """Close it: pending reads and writes end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """All that are open.

    >>> connections = Connections()
    >>> here, there = socket.socketpair()
    >>> opened = connections.add(here)
    >>> len(connections)
    1
    >>> connections.cut_overdue(time.monotonic() + SILENT)
    >>> there.recv(1)
    b''
    >>> connections.remove(here)
    >>> here.close(), there.close()
    (None, None)
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._open: dict[socket.socket, Connection] = {}
        self._threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return len(self._open)

    def of(self, open_socket: socket.socket) -> Connection:
        """The connection of a socket, also if it was cut a moment ago."""
        return self._open.get(open_socket) or Connection(open_socket)

    def add(self, new: socket.socket) -> Connection | None:
        """One more. Where there are too many, the one that has said nothing for longest has to go;
        None if all of them wait for an answer."""
        connection = Connection(new)
        connection.expect(SILENT, is_idle=True)
        with self._lock:
            if len(self._open) >= self.most:
                idle = [each for each in self._open.values() if each.is_idle]
                if not idle:
                    return None
                oldest = min(idle, key=lambda each: each.until or 0.0)
                oldest.cut()
                del self._open[oldest.socket]
            self._open[new] = connection
        return connection

    def remove(self, old: socket.socket) -> None:
        with self._lock:
            self._open.pop(old, None)

    def cut_overdue(self, now: float) -> None:
        """Cut those that keep the app waiting for too long, however busy they look."""
        with self._lock:
            for each in self._open.values():
                if each.until is not None and each.until <= now:
                    each.cut()

    def start(self, answer: Callable[[], None]) -> None:
        """Answer one of them in a thread of its own."""

        def run() -> None:
            try:
                answer()
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, daemon=True)
        self._threads.add(thread)
        thread.start()

    def end(self, seconds: float) -> bool:
        """Cut all of them, and wait so long for their threads; whether these have ended."""
        with self._lock:
            for each in self._open.values():
                each.cut()
        until = time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._threads))
