"""Where a monitor's reports go: several places, none of which keeps them from the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress

from regard.monitoring.reports import Report
from regard.monitoring.troubles import Troubles
from regard.monitoring.writers.destinations import Writer
from regard.monitoring.writers.lost_reports import lost


class Outlet:
    """A writer, and the steps whose reports it did not take."""

    def __init__(self, writer: Writer, troubles: Troubles) -> None:
        self.missed: list[int] = []
        self._writer, self._troubles = writer, troubles
        self._name = type(writer).__name__
        self._catches_up = hasattr(writer, "lost")
        self._closed = False

    def write(self, report: Report) -> None:
        with self._troubles.during(f"writing a report ({self._name})", whose=str(id(self))):
            self.missed.append(report.step)
            self._writer.write(report)
            self.missed.pop()

    def close(self) -> None:
        try:
            self._close()
        except KeyboardInterrupt:
            # There is seldom a second one, and lines may be waiting to be written.
            self._close()
            raise

    def _close(self) -> None:
        if self._closed:
            return
        if self.missed and not self._catches_up:
            self._troubles.remark(f"lost {id(self)}", str(lost(self._name, self.missed)))
        try:
            with self._troubles.during(
                f"closing what reports are written to ({self._name})", whose=str(id(self))
            ):
                self._writer.close()
        except Exception:
            self._closed = True
            raise
        self._closed = True

    def drop(self) -> None:
        """Close, and say nothing."""
        self._closed = True
        with suppress(Exception):
            self._writer.close()


class Outlets:
    """All of them: each gets its turn, and then the errors of any are raised."""

    def __init__(self, writers: Sequence[Writer], troubles: Troubles) -> None:
        self._each = [Outlet(writer, troubles) for writer in writers]

    def write(self, report: Report) -> None:
        with ExitStack() as turns:
            for outlet in reversed(self._each):
                turns.callback(outlet.write, report)

    def close(self) -> None:
        with ExitStack() as turns:
            for outlet in reversed(self._each):
                turns.callback(outlet.close)

    def drop(self) -> None:
        for outlet in self._each:
            outlet.drop()
