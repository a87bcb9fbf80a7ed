"""Whether attention weights point at what decided: the answer, and what it rests on."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.arguments import path_of
from regard.display import table_html, table_text
from regard.files import finite_or_null, replacing
from regard.interpret.attribution.attributions import SHOWN
from regard.interpret.faithfulness_report.comparison import Row, size_of_effect
from regard.interpret.faithfulness_report.token_scores import TokenScores
from regard.interpret.interventions.effects import FEW
from regard.visible import visible

CALLED = {
    "weights": "attention weights",
    "norms": "value norms",
    "rollout": "attention rollout",
    "flow": "attention flow",
    "gradients": "gradients × attention",
    "integrated": "integrated gradients",
}
SINGULAR = ("rollout", "flow")


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """How well each method ranks tokens by what cutting their edges does.

    Prints as a verdict and a table, and is both in a notebook."""

    metric: str
    softmax: str
    cuts: str
    texts: tuple[TokenScores, ...]
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    """Methods that this model has no place for, and why."""

    def __getitem__(self, name: str) -> Row:
        """The row of a method, or of a control by the first word of its name."""
        for row in self.rows:
            if row.name == name or (row.control and row.name.split()[0] == name):
                return row
        raise KeyError(name)

    @property
    def verdict(self) -> str:
        """Whether weights point at what decided, in a sentence; of the first method, if weights
        were not asked for."""
        return self.verdict_of("weights" if self._has("weights") else self.rows[0].name)

    def verdict_of(self, method: str) -> str:
        """Whether a method points at what decided, in a sentence."""
        row, position = self[method], self["position"]
        name, one = CALLED.get(method, method), method in SINGULAR
        if math.isnan(row.correlation.value):
            most = max(float(text.effect.abs().max()) for text in self.texts)
            return (
                f"Here there is nothing to point at: cutting a token's edges changes {self.metric} "
                f"by {most:.2g} at most."
            )
        found = f"rank correlation {row.correlation}"
        place = f"position alone gives {position.correlation.value:.2f}"
        if math.isnan(row.correlation.low):
            verb = "points" if one else "point"
            return (
                f"Here it cannot be told whether {name} {verb} at what decided: of "
                f"{len(self.texts)} texts one alone has effects to rank ({found}; {place})."
            )
        if 1 < len(self.texts) < FEW:
            found += f", too narrow for {len(self.texts)} texts"
        if not row.correlation.low > 0:
            verb = "does not" if one else "do not"
            return f"Here {name} {verb} point at what decided ({found}; {place})."
        if not row.beyond.low > 0:
            verb = "does" if one else "do"
            return (
                f"Here {name} {verb} no better than position at pointing at what decided "
                f"({found}; {place})."
            )
        verb = "points" if one else "point"
        return f"Here {name} {verb} at what decided, beyond position ({found}; {place})."

    @property
    def points(self) -> bool:
        """Whether weights do, beyond position."""
        row = self["weights" if self._has("weights") else self.rows[0].name]
        return row.correlation.low > 0 and row.beyond.low > 0

    def records(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON or a data frame."""
        return [
            {
                "name": row.name,
                "control": row.control,
                "correlation": row.correlation.value,
                "low": row.correlation.low,
                "high": row.correlation.high,
                "top_fifth": row.top,
                "beyond_position": row.beyond.value,
                "beyond_low": row.beyond.low,
                "beyond_high": row.beyond.high,
            }
            for row in self.rows
        ]

    def tokens(self) -> list[dict[str, Any]]:
        """The tokens of all texts as plain values."""
        return [
            {"text": t, "token": i, "word": text.words[i], "effect": float(text.effect[i])}
            | {method: float(score[i]) for method, score in text.scores.items()}
            for t, text in enumerate(self.texts)
            for i in range(len(text.effect))
        ]

    def json(self) -> str:
        """The verdict, the rows and the tokens; what is not finite is null."""
        whole = {
            "verdict": self.verdict,
            "metric": self.metric,
            "softmax": self.softmax,
            "cuts": self.cuts,
            "texts": len(self.texts),
            "rows": self.records(),
            "tokens": self.tokens(),
            "left_out": list(self.left_out),
        }
        return json.dumps(finite_or_null(whole), indent=1, ensure_ascii=False, allow_nan=False)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the same to a JSON file."""
        with replacing(path_of(path)) as unfinished:
            unfinished.write_text(self.json() + "\n", "utf-8")
        return Path(path)

    def page(self, path: str | os.PathLike[str]) -> Path:
        """Write an HTML file that needs nothing else."""
        from regard.interpret.faithfulness_report.report_page import page

        with replacing(path_of(path)) as unfinished:
            unfinished.write_text(page(self), "utf-8")
        return Path(path)

    def _has(self, method: str) -> bool:
        return any(row.name == method for row in self.rows)

    def table(self) -> list[list[str]]:
        """The rows as texts."""
        head = ["", "rank correlation", "95 % interval", "top fifth has", "less position"]
        return [head, *(_cells(row) for row in self.rows)]

    def token_table(self, text: TokenScores) -> list[list[str]]:
        """The tokens of a text as texts, those first that did most."""
        methods = list(text.scores)
        order = size_of_effect(text).argsort(descending=True, stable=True)[:SHOWN].tolist()
        return [
            ["token", "effect", *methods],
            *(
                [
                    f"{i} {visible(text.words[i])!r}",
                    f"{float(text.effect[i]):+.3g}",
                    *(f"{float(text.scores[m][i]):.3g}" for m in methods),
                ]
                for i in order
            ),
        ]

    def notes(self) -> list[str]:
        """What the numbers are."""
        edges = (
            "no later token may look at it"
            if self.cuts == "token"
            else "the last token may not look at it"
        )
        over = "texts" if len(self.texts) > 1 else "tokens"
        size = f"{len(self.texts)} texts" if len(self.texts) > 1 else "1 text"
        return [
            f"{size}; effect: {self.metric} when a token's edges are cut {self.softmax} softmax "
            f"in all heads ({edges}), less without",
            f"correlation: of scores with the size of the effect; intervals over {over}"
            + (", too narrow for so few" if 1 < len(self.texts) < FEW else ""),
            "methods that agree with each other prove nothing: only the effect was tried",
            *(f"left out: {why}" for why in self.left_out),
        ]

    def __repr__(self) -> str:
        parts = [self.verdict, "", table_text(self.table(), self.notes())]
        if len(self.texts) == 1:
            parts += ["", table_text(self.token_table(self.texts[0]), [])]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        table = table_html(
            self.table(), header=True, numbers=True, title=self.verdict, notes=self.notes()
        )
        if len(self.texts) > 1:
            return table
        return f"{table}\n{table_html(self.token_table(self.texts[0]), header=True, numbers=True)}"


def _cells(row: Row) -> list[str]:
    name, low, high = row.name, row.correlation.low, row.correlation.high
    beyond = "–"
    if not math.isnan(row.beyond.value):
        beyond = f"{row.beyond.value:+.2f} ({row.beyond.low:+.2f} to {row.beyond.high:+.2f})"
    return [
        f"{name}{' (control)' if row.control else ''}",
        "–" if math.isnan(row.correlation.value) else f"{row.correlation.value:+.2f}",
        "–" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}",
        "–" if math.isnan(row.top) else f"{row.top:.0%}",
        beyond,
    ]
