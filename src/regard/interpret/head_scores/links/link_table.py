"""Heads that link one word to another: a table, ranked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

from regard.interpret.head_scores.tables.plain_table import PlainTable, cut
from regard.visible import visible


@dataclass(frozen=True)
class Link:
    """What one head gives from one word to another."""

    link: str
    layer: int
    head: int
    path: str
    share: float
    """The weight that goes from the one to the other: the sum over the key's tokens, the mean over
    the query's tokens and over texts."""
    usual: float
    """What the head gives, on average over all rows of these texts, at the same distance."""
    uniform: float
    """What a row that gives every key it may see the same would give."""
    z: float
    """How far the share is above what the same rows give elsewhere, in standard deviations."""
    p: float
    """How often as much goes to places drawn at random from the same rows."""
    p_corrected: float
    """The same for the best of all heads (Holm): the more heads are tried, the more is luck."""
    texts: int


@dataclass(frozen=True, repr=False)
class Links(PlainTable, Sequence[Link]):
    """Heads by how much of their weight goes from one word to another, most first."""

    rows: tuple[Link, ...]
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, place: int) -> Link: ...
    @overload
    def __getitem__(self, place: slice) -> Links: ...
    def __getitem__(self, place: int | slice) -> Link | Links:
        if isinstance(place, slice):
            return replace(self, rows=self.rows[place])
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Link]:
        return iter(self.rows)

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON or a data frame."""
        return [asdict(row) for row in self.rows]

    def _table(self) -> list[list[str]]:
        head = ["link", "head", "share", "usual there", "uniform", "z", "p", "corrected"]
        return [head] + [
            [
                visible(row.link), f"layer {row.layer} head {row.head}", f"{row.share:.0%}",
                f"{row.usual:.1%}", f"{row.uniform:.1%}", f"{row.z:+.1f}", f"{row.p:.2g}",
                f"{row.p_corrected:.2g}",
            ]
            for row in self.rows[: cut(len(self.rows))]
        ]  # fmt: skip

    def _notes(self) -> list[str]:
        return [visible(note) for note in self.notes]
