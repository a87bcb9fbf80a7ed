"""What interventions did to a metric: a table, with the uncertainty that few texts leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from regard.display import table_html, table_text
from regard.interpret.interventions.intervention import Heads
from regard.values import whole
from regard.visible import visible

RESAMPLES = 2000
FEW = 10
"""Texts, below which an interval over texts is said to be too narrow: of two, one that is called
95 % holds every second mean."""
SHOWN = 20
"""Rows that a table shows at most, unless there are few more."""


@dataclass(frozen=True, eq=False)
class Effect:
    """What one intervention did."""

    what: str
    heads: Heads
    clean: float
    """The mean of the metric over texts, with the model as it is."""
    changed: float
    effect: float
    """The mean of what the intervention added to it."""
    low: float
    high: float
    """The interval of the effect that holds 95 % of resampled sets of texts; NaN for one text, and
    where the effect on a text is no finite number."""
    size: float
    """The effect over its standard deviation between texts (Cohen's d, paired); NaN for one."""
    each: Float[Tensor, "texts"]
    """What it added for each text."""
    recovered: float | None = None
    """For a patch: the effect as a share of what lies between the two texts."""

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Effects(Sequence[Effect]):
    """What each of several interventions did, in the order they were asked for.

    Prints as a table, and is one in a notebook."""

    title: str
    metric: str
    texts: int
    rows: tuple[Effect, ...]

    @overload
    def __getitem__(self, place: int) -> Effect: ...
    @overload
    def __getitem__(self, place: slice) -> Effects: ...
    def __getitem__(self, place: int | slice) -> Effect | Effects:
        if isinstance(place, slice):
            return replace(self, rows=self.rows[place])
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.rows)

    def sorted(self) -> Effects:
        """The largest effects first, whichever way they go."""
        order = sorted(self.rows, key=lambda row: math.isnan(row.effect) or -abs(row.effect))
        return replace(self, rows=tuple(order))

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON or a data frame."""
        return [
            {
                "what": row.what,
                "heads": {path: list(heads) for path, heads in row.heads.items()},
                "clean": row.clean,
                "changed": row.changed,
                "effect": row.effect,
                "low": row.low,
                "high": row.high,
                "size": row.size,
                "texts": self.texts,
                "each": row.each.tolist(),
            }
            | ({} if row.recovered is None else {"recovered": row.recovered})
            for row in self.rows
        ]

    def _table(self) -> list[list[str]]:
        patched = any(row.recovered is not None for row in self.rows)
        head = [self.title, "unchanged", self.metric, "effect", "95 % interval", "size"]
        table = [head + (["recovered"] if patched else [])]
        cut = self.rows if len(self.rows) <= SHOWN + 2 else self.rows[:SHOWN]
        for row in cut:
            interval = "–" if math.isnan(row.low) else f"{row.low:+.3g} to {row.high:+.3g}"
            cells = [
                visible(row.what), f"{row.clean:.4g}", f"{row.changed:.4g}", f"{row.effect:+.3g}",
                interval, "–" if math.isnan(row.size) else f"{row.size:+.2f}",
            ]  # fmt: skip
            table.append(cells + ([_share(row.recovered)] if patched else []))
        return table

    def _notes(self) -> list[str]:
        left = len(self.rows) - len(self._table()) + 1
        more = [f"… and {left} more; .sorted() has the largest first"] if left else []
        texts = f"{self.texts} texts" if self.texts > 1 else "1 text: no interval"
        texts += ": intervals are too narrow for so few" if 1 < self.texts < FEW else ""
        return [*more, f"{texts}; effect: {self.metric} with the intervention less without"]

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())


def _share(recovered: float | None) -> str:
    return "–" if recovered is None or math.isnan(recovered) else f"{recovered:.0%}"


def effects(
    title: str,
    metric: str,
    named: Sequence[tuple[str, Heads]],
    clean: Float[Tensor, "texts"],
    changed: Float[Tensor, "interventions texts"],
    target: Float[Tensor, "texts"] | None = None,
    seed: int = 0,
) -> Effects:
    """The table of a metric of texts, as it was and as interventions made it. `target` is what it
    is for the texts that were patched from."""
    texts = len(clean)
    draw = torch.Generator().manual_seed(whole("seed", seed))
    drawn = torch.randint(texts, (RESAMPLES, texts), generator=draw) if texts > 1 else None
    rows = []
    for (what, heads), after in zip(named, changed, strict=True):
        each = after - clean
        low = high = size = math.nan
        # Between two resampled means of which one is infinite lies no number.
        if drawn is not None and bool(each.isfinite().all()):
            means = each[drawn].mean(1)
            low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
            deviation = float(each.std())
            size = float(each.mean()) / deviation if deviation > 0 else math.nan
        effect = float(each.mean())
        recovered = None
        if target is not None:
            between = float((target - clean).mean())
            recovered = effect / between if between else math.nan
        rows.append(
            Effect(
                what, heads, float(clean.mean()), float(after.mean()), effect, low, high, size,
                each, recovered,
            )
        )  # fmt: skip
    return Effects(title, metric, texts, tuple(rows))
