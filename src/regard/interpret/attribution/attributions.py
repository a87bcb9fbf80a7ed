"""What a method says that each token did: numbers, a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from regard.display import table_html, table_text
from regard.interpret.interventions.outputs import Place
from regard.visible import visible

SHOWN = 20
"""Tokens that a table shows at most."""


def place_named(place: Place) -> str:
    """A layer's call as a table names it."""
    path, nth = place
    return (path or "(model)") + (f" (call {nth + 1})" if nth else "")


@dataclass(frozen=True, eq=False)
class Attribution:
    """How much each token did by one method, for all chosen queries together.

    Prints as a table of the strongest tokens, and is one in a notebook."""

    method: str
    about: str
    """What a number is, in a phrase."""
    tokens: Float[Tensor, "b k"]
    """The score of each token: over queries, heads and layers."""
    heads: Mapping[Place, Float[Tensor, "b h k"]] = field(default_factory=dict)
    """The score of each token in each head, over queries. Empty where scores are not per head."""
    rows: Mapping[Place, Float[Tensor, "b h r k"]] = field(default_factory=dict)
    """The score of each pair, for the queries that were chosen, in their order."""
    words: Sequence[str] | None = None
    weights: Attribution | None = None
    """The raw weights beside, for norms."""
    value: Float[Tensor, "b"] | None = None
    """The metric, for methods that have one."""
    explained: Float[Tensor, "b"] | None = None
    """What the scores should add up to, where that is known: the metric with all weights less the
    metric without."""

    @property
    def gap(self) -> Float[Tensor, "b"] | None:
        """`explained` less the sum of the scores: the error of the steps."""
        return None if self.explained is None else self.explained - self.tokens.sum(-1)

    def by_head(self) -> dict[Place, Float[Tensor, "b h"]]:
        """The score of each head, over tokens."""
        return {place: scores.sum(-1) for place, scores in self.heads.items()}

    def records(self) -> list[dict[str, Any]]:
        """The scores as plain values, for JSON or a data frame: a record for each token."""
        beside = self.weights.tokens.tolist() if self.weights is not None else None
        return [
            {"sequence": b, "token": k, "method": self.method, "score": score}
            | ({} if self.words is None else {"word": self.words[k]})
            | ({} if beside is None else {"weight": beside[b][k]})
            for b, scores in enumerate(self.tokens.tolist())
            for k, score in enumerate(scores)
        ]

    def _table(self) -> list[list[str]]:
        batch = len(self.tokens) > 1
        named = self.method if self.weights is None else f"{self.method}  "
        head = ["token", named.strip(), *(["weights"] if self.weights is not None else [])]
        head += ["strongest head"] if self.heads else []
        table = [head]
        flat = self.tokens.flatten()
        order = flat.abs().nan_to_num(-1).argsort(descending=True, stable=True)[:SHOWN]
        for at in order.tolist():
            b, k = divmod(at, self.tokens.shape[1])
            word = "" if self.words is None else f" {visible(self.words[k])!r}"
            cells = [(f"{b}: " if batch else "") + f"{k}{word}", f"{float(flat[at]):.4g}"]
            if self.weights is not None:
                cells.append(f"{float(self.weights.tokens[b, k]):.4g}")
            if self.heads:
                cells.append(self._strongest(b, k))
            table.append(cells)
        return table

    def _strongest(self, b: int, k: int) -> str:
        """The head that gives a token most."""
        best = {place: scores[b, :, k].abs() for place, scores in self.heads.items()}
        place = max(best, key=lambda one: float(best[one].max()))
        return f"{visible(place_named(place))} head {int(best[place].argmax())}"

    def _notes(self) -> list[str]:
        left = self.tokens.numel() - SHOWN
        notes = [f"… and {left} more"] if left > 0 else []
        notes.append(self.about)
        if self.explained is not None and self.gap is not None:
            worst = int(self.gap.abs().argmax())
            notes.append(
                f"explains {float(self.explained[worst]):+.4g}; "
                f"the scores miss {float(self.gap[worst]):+.2g} of it"
            )
        return notes

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())
