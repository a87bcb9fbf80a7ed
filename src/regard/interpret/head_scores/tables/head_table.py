"""What each head of a model does: a table of scores, each beside what random weights give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

from regard.errors import RegardError
from regard.interpret.head_scores.links.link_table import Links
from regard.interpret.head_scores.syntax.syntax_table import Syntax
from regard.interpret.head_scores.tables.badge_rules import Held, badge_of
from regard.interpret.head_scores.tables.plain_table import PlainTable, cut
from regard.interpret.head_scores.tables.score_names import SCORES, shown
from regard.visible import visible

Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Score:
    """A score of one head; NaN where it cannot be known."""

    value: float
    low: float = math.nan
    high: float = math.nan
    """The interval that holds 95 % of what resampled sets of texts give; NaN for one text."""
    random: float = math.nan
    """The mean of the layer's heads with random weights."""
    random_most: float = math.nan
    """The most that any of them has."""


class Column(NamedTuple):
    """One score of all heads of a layer."""

    value: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    random: float
    random_most: float


class OwnScores(Mapping[str, Score]):
    """The scores of one head, each made when it is asked for: a model has thousands, and few of
    them are looked at one by one.

    >>> OwnScores({"first": Column([0.5, 0.25], [0.4, 0.2], [0.6, 0.3], 0.1, 0.2)}, 1)
    {'first': Score(value=0.25, low=0.2, high=0.3, random=0.1, random_most=0.2)}
    """

    def __init__(self, columns: Mapping[str, Column], head: int) -> None:
        self._columns, self._head = columns, head

    def __getitem__(self, name: str) -> Score:
        value, low, high, *random = self._columns[name]
        return Score(value[self._head], low[self._head], high[self._head], *random)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class HeadRow:
    """One head, and its scores by name."""

    layer: int
    head: int
    path: str
    scores: Mapping[str, Score]
    offset: int | None = None
    """The fixed offset that gets most: 1 is the token before, -1 the one after."""

    @property
    def what(self) -> str:
        return f"layer {self.layer} head {self.head}"

    @property
    def badge(self) -> str:
        """One word for what it does most plainly, or none."""
        return badge_of({n: Held(s.value, s.random_most) for n, s in self.scores.items()})

    def __getitem__(self, name: str) -> float:
        return self.scores[checked(name)].value if name in self.scores else _unknown(name)


@dataclass(frozen=True, repr=False)
class HeadScores(PlainTable, Sequence[HeadRow]):
    """What each head does, layer by layer. Prints as a table, and is one in a notebook."""

    rows: tuple[HeadRow, ...]
    paths: tuple[str, ...]
    texts: int
    links: Links = field(default_factory=lambda: Links(()))
    """The heads that link what was asked about, most first."""
    syntax: Syntax = field(default_factory=lambda: Syntax(()))
    """The heads that follow a parse, most first."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    @overload
    def __getitem__(self, place: int) -> HeadRow: ...
    @overload
    def __getitem__(self, place: slice) -> HeadScores: ...
    def __getitem__(self, place: int | slice) -> HeadRow | HeadScores:
        if isinstance(place, slice):
            return replace(self, rows=self.rows[place])
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[HeadRow]:
        return iter(self.rows)

    def at(self, layer: int, head: int) -> HeadRow:
        """A head by its numbers."""
        for row in self.rows:
            if (row.layer, row.head) == (layer, head):
                return row
        raise RegardError(
            "there is no such head",
            got=f"(layer {layer}, head {head})",
            accepted=f"layers 0 to {len(self.paths) - 1}: {', '.join(self.paths[:4])}, …",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The scores that are known of any head."""
        return tuple(name for name in SCORES if any(not math.isnan(row[name]) for row in self.rows))

    def sorted(self, by: str) -> HeadScores:
        """The heads with the most of a score first."""
        checked(by)
        order = sorted(self.rows, key=lambda row: _last(row[by]))
        return replace(self, rows=tuple(order))

    def best(self, score: str) -> HeadRow:
        """The head that has most of a score."""
        found = self.sorted(score)[0]
        if math.isnan(found[score]):
            raise RegardError(
                f"{score!r} is not known of any head",
                got="; ".join(self.notes) or "no text in which it could be seen",
            )
        return found

    def grid(self, score: str, of: str = "value") -> Grid:
        """A score of every head, layer by layer; or its "low", "high" or "random"."""
        checked(score)
        nothing = Score(math.nan)
        return tuple(
            tuple(
                float(getattr(row.scores.get(score, nothing), of))
                for row in sorted(self.rows, key=lambda row: row.head)
                if row.layer == layer
            )
            for layer in range(len(self.paths))
        )

    def badges(self) -> tuple[tuple[str, ...], ...]:
        """One word for every head, layer by layer: "previous", "induction", "duplicate", "first",
        "separator", "local", "broad", or none."""
        ordered = sorted(self.rows, key=lambda row: row.head)
        return tuple(
            tuple(row.badge for row in ordered if row.layer == layer)
            for layer in range(len(self.paths))
        )

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON or a data frame."""
        return [
            {
                "layer": row.layer,
                "head": row.head,
                "path": row.path,
                "badge": row.badge,
                "offset": row.offset,
                "texts": self.texts,
                "scores": {
                    name: {
                        "value": score.value,
                        "low": score.low,
                        "high": score.high,
                        "random": score.random,
                    }
                    for name, score in row.scores.items()
                },
            }
            for row in self.rows
        ]

    def _table(self) -> list[list[str]]:
        names = [name for name in self.names if name != "offset"]
        offsets = any(row.offset is not None for row in self.rows)
        table = [["head", "badge", *(["offset"] if offsets else []), *names]]
        for row in self.rows[: cut(len(self.rows))]:
            far = (
                f"{row.offset:+d}: {shown('offset', row['offset'])}"
                if row.offset is not None
                else "–"
            )
            table.append(
                [row.what, row.badge, *([far] if offsets else []),
                 *(shown(name, row[name]) for name in names)]
            )  # fmt: skip
        usual = ["random weights", "", *(["–"] if offsets else [])]
        for name in names:
            known = [row.scores[name].random for row in self.rows if name in row.scores]
            known = [value for value in known if not math.isnan(value)]
            usual.append(shown(name, sum(known) / len(known) if known else math.nan))
        return [*table, usual]

    def _notes(self) -> list[str]:
        left = len(self.rows) - cut(len(self.rows))
        more = [f"… and {left} more heads; .sorted(score) has the largest first"] if left else []
        texts = f"{self.texts} texts" if self.texts > 1 else "1 text: no intervals"
        return [visible(line) for line in (*more, texts, *self.notes)]


def checked(name: str) -> str:
    """The name of a score, if it is one."""
    if name not in SCORES:
        raise RegardError("unknown score", got=repr(name), accepted=", ".join(map(repr, SCORES)))
    return name


def _unknown(name: str) -> float:
    checked(name)
    return math.nan


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else -value
