"""Heads that follow a parse: a table, ranked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

from regard.interpret.head_scores.tables.plain_table import PlainTable, cut
from regard.visible import visible


@dataclass(frozen=True)
class Follows:
    """How one head follows one relation, one way."""

    relation: str
    """The label of the arcs, "all" for all of them."""
    towards: str
    """ "head": from a token to its syntactic head; "dependent": the other way."""
    layer: int
    head: int
    path: str
    weight: float
    """The mean weight of the arcs that may be seen."""
    hits: float
    """The share of these where no other key has more."""
    baseline: float
    """The hits of always looking at the same offset: the best there is."""
    offset: int
    """Which: 1 is the token before."""
    arcs: int


@dataclass(frozen=True, repr=False)
class Syntax(PlainTable, Sequence[Follows]):
    """Heads by how often they look where an arc ends, most above the baseline first."""

    rows: tuple[Follows, ...]

    @overload
    def __getitem__(self, place: int) -> Follows: ...
    @overload
    def __getitem__(self, place: slice) -> Syntax: ...
    def __getitem__(self, place: int | slice) -> Follows | Syntax:
        if isinstance(place, slice):
            return replace(self, rows=self.rows[place])
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Follows]:
        return iter(self.rows)

    def of(self, relation: str = "all", towards: str = "head") -> Syntax:
        """The heads for one relation, one way."""
        keeps = (row.relation == relation and row.towards == towards for row in self.rows)
        return replace(self, rows=tuple(r for r, k in zip(self.rows, keeps, strict=True) if k))

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON or a data frame."""
        return [asdict(row) for row in self.rows]

    def _table(self) -> list[list[str]]:
        head = ["relation", "towards", "head", "weight", "hits", "best offset", "its hits", "arcs"]
        return [head] + [
            [
                visible(row.relation), row.towards, f"layer {row.layer} head {row.head}",
                f"{row.weight:.0%}", f"{row.hits:.0%}", f"{row.offset:+d}", f"{row.baseline:.0%}",
                str(row.arcs),
            ]
            for row in self.rows[: cut(len(self.rows))]
        ]  # fmt: skip
