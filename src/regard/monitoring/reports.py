"""What the heads did over a window of training steps, as plain numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from regard.monitoring.logit_spread import HeadSpread
from regard.monitoring.telemetry import Telemetry


@dataclass(frozen=True)
class Heads:
    """One layer's heads, a number for each. NaN where there was nothing to say it of: no rows that
    see something, or none without NaN or infinity, which `non_finite` counts."""

    max_logit: tuple[float, ...]
    """Infinite where a logit was, NaN where one was NaN; the other numbers are those of the rows
    that hold neither."""
    mean_logit: tuple[float, ...]
    entropy: tuple[float, ...]
    """As a share of the most it could be, the log of the keys that may be seen: 1 for a head that
    looks at all of them alike, 0 for one that always looks at a single key."""
    sink: tuple[float, ...]
    """The share of the weights on the first key, and on a learned sink."""
    empty: tuple[float, ...]
    """The share of rows that may see nothing."""
    non_finite: tuple[float, ...]
    """How many rows hold NaN or infinity in their logits or their output."""
    output: tuple[float, ...]
    """The size of what a head gives: the root of the mean square, before the output projection."""
    clipped: tuple[float, ...]
    """In how many of the steps looked at QK-clip made the head's logits smaller."""
    std_logit: tuple[float, ...] = ()
    """The standard deviation of a row's logits around their mean, in the first step looked at: the
    root of the mean variance over rows that see two keys or more. NaN where that takes a pass over
    the pairs, which nobody asked for: `Monitor(logits=True)` asks."""
    min_logit: tuple[float, ...] = ()
    """The least logit, in the first step looked at; empty unless `Monitor(logits=True)`."""

    @staticmethod
    def of(found: Telemetry, clipped: Tensor, spread: HeadSpread) -> Heads:
        sums = found.statistics
        sound = sums.rows - sums.empty - sums.broken
        largest = sums.max_logit.masked_fill(sound == 0, math.nan)
        largest = largest.masked_fill(found.infinite > 0, math.inf)
        numbers = (
            largest.masked_fill(sums.broken > found.infinite, math.nan),
            found.mean_logit / sound,
            sums.entropy / found.room,
            found.sink / sound,
            sums.empty / sums.rows,
            found.non_finite,
            (found.output / sound).sqrt(),
            clipped,
            (spread.variance / spread.choosing).sqrt(),
        )
        asked = bool((spread.lowest < math.inf).any())
        lowest = [spread.lowest.masked_fill(spread.lowest == math.inf, math.nan)] if asked else []
        return Heads(*(tuple(t.to(torch.float64).tolist()) for t in (*numbers, *lowest)))

    def __len__(self) -> int:
        return len(self.max_logit)


@dataclass(frozen=True)
class Finding:
    """Heads that break a rule: the worst of them, and which others."""

    rule: str
    step: int
    layer: str
    head: int
    what: str
    value: float
    limit: str
    trend: tuple[float, ...]
    """The same number in the last windows, this one last."""
    others: Mapping[str, tuple[int, ...]]
    """More heads that break the rule, by layer."""
    do: str

    def __str__(self) -> str:
        lines = [
            f"{self.rule} at step {self.step}: {self.layer or '(model)'}, head {self.head} has "
            f"{self.what} {_short(self.value)}, {self.limit}"
        ]
        if len(self.trend) > 1:
            lines.append(f"  trend:    {' → '.join(map(_short, self.trend))}")
        if self.others:
            lines.append(f"  also:     {_listed(self.others)}")
        return "\n".join([*lines, f"  try:      {self.do}"])


@dataclass(frozen=True, repr=False)
class Report:
    """One window: what each head did, averaged over the steps that were looked at."""

    step: int
    """The step that ended the window."""
    looks: int
    """How many steps were looked at."""
    layers: Mapping[str, Heads]
    findings: tuple[Finding, ...] = ()

    def record(self) -> dict[str, Any]:
        """All of it, as JSON can hold it. What was not finite is "NaN", "Infinity" or "-Infinity",
        which every language reads as a number again; null is an undefined number."""
        return {
            "step": self.step,
            "looks": self.looks,
            "layers": {path: _written(heads) for path, heads in self.layers.items()},
            "findings": [_worded(asdict(finding)) for finding in self.findings],
        }

    def scalars(self, *, heads: bool = False) -> dict[str, float]:
        """A few numbers per layer by name, or every number of every head: for what draws curves."""
        found: dict[str, float] = {}
        for path, layer in self.layers.items():
            at = f"attention/{path or 'model'}"
            for field in fields(layer):
                each: tuple[float, ...] = getattr(layer, field.name)
                for name, how in _TELLING[field.name].items():
                    found[f"{at}/{name}"] = how([value for value in each if not math.isnan(value)])
                if heads:
                    found |= {f"{at}/{field.name}/head_{i}": value for i, value in enumerate(each)}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def __repr__(self) -> str:
        rows = self._table()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        """A table, as the last line of a notebook's cell, and what broke a rule below it."""
        head, *body = self._table()
        cells = [_row("th", head), *(_row("td", row) for row in body)]
        told = "".join(f"<pre>{html.escape(str(finding))}</pre>" for finding in self.findings)
        return (
            f"<table><caption>{html.escape(self._title())}</caption>"
            f"<thead>{cells[0]}</thead><tbody>{''.join(cells[1:])}</tbody></table>{told}"
        )

    def _title(self) -> str:
        return f"step {self.step}, {self.looks} looked at"

    def _table(self) -> list[tuple[str, ...]]:
        return [
            ("layer", "max logit", "mean logit", "std", "entropy", "sink", "empty", "non-finite"),
            *(
                (
                    path or "(model)",
                    _short(_most(heads.max_logit)),
                    _short(_mean(heads.mean_logit)),
                    _short(_mean(heads.std_logit)),
                    f"{_mean(heads.entropy):.2f} ({_least(heads.entropy):.2f}"
                    f"–{_most(heads.entropy):.2f})",
                    f"{_mean(heads.sink):.0%}",
                    f"{_mean(heads.empty):.0%}",
                    f"{sum(heads.non_finite):.0f}",
                )
                for path, heads in self.layers.items()
            ),
        ]


def _row(tag: str, cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _written(heads: Heads) -> dict[str, list[Any]]:
    broken = [count > 0 for count in heads.non_finite]
    return {
        name: [
            None if math.isnan(value) and not ill else _worded(value)
            for value, ill in zip(each, broken, strict=True)
        ]
        for name, each in asdict(heads).items()
        if each
    }


def _worded(value: Any) -> Any:
    """A value for JSON, which knows no NaN and no infinity: words stand for them.

    >>> _worded({"trend": (1.5, math.inf)})
    {'trend': [1.5, 'Infinity']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _worded(part) for name, part in value.items()}
    return [_worded(part) for part in value] if isinstance(value, (tuple, list)) else value


def _mean(values: Any) -> float:
    return sum(values) / len(values) if values else math.nan


def _least(values: Any) -> float:
    return -_most([-value for value in values])


def _most(values: Any) -> float:
    """The largest; NaN if one is, wherever it stands: Python's own depends on the order."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=math.nan)


_TELLING: dict[str, dict[str, Callable[[Any], float]]] = {
    "max_logit": {"max_logit": _most},
    "mean_logit": {"mean_logit": _mean},
    "entropy": {"entropy": _mean, "entropy_min": _least, "entropy_max": _most},
    "sink": {"sink": _mean, "sink_max": _most},
    "empty": {"empty": _mean},
    "non_finite": {"non_finite": sum},
    "output": {"output": _mean, "output_min": _least},
    "clipped": {"clipped": sum},
    "std_logit": {"std_logit": _mean, "std_logit_max": _most},
    "min_logit": {"min_logit": _least},
}
"""What of a layer's heads is worth a curve."""


def _short(value: float) -> str:
    return f"{value:.3g}"


def _listed(others: Mapping[str, tuple[int, ...]], most: int = 3) -> str:
    shown = [
        f"{path or '(model)'} head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"
        for path, heads in list(others.items())[:most]
    ]
    left = len(others) - len(shown)
    return "; ".join([*shown, *([f"and {left} more layers"] if left else [])])
