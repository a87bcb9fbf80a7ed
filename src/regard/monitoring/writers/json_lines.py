"""Reports as lines of JSON in a file that may be full, cut off, or written to by others."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from regard.errors import RegardError
from regard.monitoring.reports import Report
from regard.monitoring.writers.lost_reports import lost

_MOST_WAITING = 64 * 2**20
"""How many bytes are held for a disk that stays full."""


class JsonLines:
    """A file with one JSON object per window, every number of every head in it. A run that is
    continued adds to the file, and begins on a line of its own.

    A line is handed to the system before training goes on, so that a run that is killed keeps it.
    The disk itself is waited for when the file is closed. Lines that cannot be written wait, up to
    64 MB of them, and are written as soon as they can be: each is once and whole in the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # Without a buffer, whose content nobody knows once a write of it has failed.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise RegardError(
                "reports cannot be written there",
                got=str(error),
                accepted="a path in a folder that exists and can be written to",
            ) from None
        self._waiting: deque[_Line] = deque()
        self._given_up: list[int] = []
        self._in_doubt = True
        """Whether the file may end in the middle of a line."""
        self._counted = 0

    @property
    def lost(self) -> list[int]:
        """The steps whose lines are not in the file: given up, or still waiting."""
        return [*self._given_up, *(line.step for line in self._waiting)]

    def write(self, report: Report) -> None:
        text = json.dumps(report.record(), allow_nan=False).encode() + b"\n"
        self._waiting.append(_Line(report.step, text))
        try:
            self._catch_up()
        except OSError as error:
            self._give_up_oldest()
            raise RegardError(
                f"{self.path} cannot be written to now",
                got=str(error),
                do="make room, or see that it can be written to: the file then catches up",
            ) from None

    def close(self) -> None:
        if self._file.closed:
            return
        why = ""
        try:
            self._catch_up()
            if self._regular():
                os.fsync(self._file.fileno())
        except OSError as error:
            why = str(error)
        # Not if Ctrl-C came: what waits can still be written, by closing again.
        try:
            self._file.close()
        except OSError as error:
            why = why or str(error)
        if self.lost:
            raise lost(self.path, self.lost, why)
        if why:
            raise RegardError(
                f"{self.path} may not be whole on disk", got=why, do="see that there is room"
            )

    def _catch_up(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            size = self._size()
            if line.begins is None:
                if self._in_doubt and not self._ends_with_a_line(size):
                    line.text = b"\n" + line.text.lstrip(b"\n")
                self._in_doubt, line.begins = False, size
            there = size - line.begins
            if not line.may_have(there):
                # Somebody else emptied the file, or added to it.
                line.begins, line.written, self._in_doubt = None, 0, True
            elif there < len(line.text):
                line.written = None
                try:
                    self._counted += self._put(line.text[there:])
                except OSError:
                    line.written = there
                    raise
                line.written = self._size() - line.begins
            else:
                self._waiting.popleft()

    def _put(self, text: bytes) -> int:
        count = self._file.write(text)
        if not count:
            raise BlockingIOError(errno.EAGAIN, "it cannot be written to at the moment")
        return count

    def _give_up_oldest(self) -> None:
        while sum(len(line.text) for line in self._waiting) > _MOST_WAITING:
            self._given_up.append(self._waiting.popleft().step)
            self._in_doubt = True

    def _regular(self) -> bool:
        return stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size if self._regular() else self._counted

    def _ends_with_a_line(self, size: int) -> bool:
        if not size or not self._regular():
            return True
        try:
            with self.path.open("rb") as file:
                file.seek(size - 1)
                return file.read(1) == b"\n"
        except OSError:
            return True


@dataclass
class _Line:
    """A line that is not known to be in the file, or not all of it."""

    step: int
    text: bytes
    begins: int | None = None
    """Where in the file."""
    written: int | None = 0
    """How many of its bytes are there; None if nobody waited for the answer: Ctrl-C."""

    def may_have(self, there: int) -> bool:
        return 0 <= there <= len(self.text) and self.written in (None, there)
