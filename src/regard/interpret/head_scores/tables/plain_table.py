"""Rows that print as a table, and are one in a notebook."""

from __future__ import annotations

from regard.display import table_html, table_text

SHOWN = 20
"""Rows that a table shows at most, unless there are few more."""


class PlainTable:
    """What prints as a table: `_table` has its cells, the first row names the columns."""

    def _table(self) -> list[list[str]]:
        raise NotImplementedError

    def _notes(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())


def cut(many: int) -> int:
    """How many of so many rows are shown."""
    return many if many <= SHOWN + 2 else SHOWN
