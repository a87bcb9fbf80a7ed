"""Layers of which only statistics were kept: numbers of each head, and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.files import finite_or_null
from regard.seen import Layer, Seen
from regard.traces import Trace

KEEP = 'watch(model, keep="traces"), or regard record --keep traces'
"""How there would have been weights."""


@dataclass(frozen=True, eq=False)
class Summary:
    """A layer without traces.

    >>> import regard, torch
    >>> x = torch.zeros(1, 2, 4, 8)
    >>> layer = Layer("attn")
    >>> layer.take(regard.trace(x, x, x), 0, keep=False)
    >>> Summary(layer).statistics()
    {'entropy': [1.38629, 1.38629], 'first': [0.25, 0.25], 'max_logit': [0.0, 0.0]}
    """

    layer: Layer

    @property
    def name(self) -> str:
        return self.layer.path or "(model)"

    @property
    def heads(self) -> int:
        return self.layer.heads

    @property
    def calls(self) -> int:
        return self.layer.calls

    def statistics(self) -> dict[str, list[float | None]]:
        """What is known of each head, over all calls: means over its rows, its largest logit, and
        the shares of rows that saw nothing or broke, if there are any. None: not a number."""
        layer = self.layer
        found = {
            "entropy": _numbers(layer.entropy, 5),
            "first": _numbers(layer.first, 5),
            "max_logit": _numbers(layer.max_logit, 4),
        }
        sums = layer.statistics
        assert sums is not None, "reading the entropy has added up what waited"
        for name, rows in (("empty", sums.empty), ("broken", sums.broken)):
            if bool(rows.any()):
                found[name] = _numbers(rows / sums.rows, 5)
        return found

    def describe(self) -> dict[str, Any]:
        """The layer as the front end receives it."""
        return {
            "name": self.name,
            "heads": self.heads,
            "calls": self.calls,
            "statistics": self.statistics(),
        }


def known_of(layer: Layer) -> bool:
    """Whether there are statistics of a layer: a file need not hold any."""
    return layer.statistics is not None or layer._waiting is not None


def only_statistics(what: Trace | Seen) -> bool:
    """Whether layers were seen, and none of them with its traces."""
    if isinstance(what, Trace) or not len(what):
        return False
    return not any(len(layer.traces) for layer in what.values())


def refuse_places(got: str) -> RegardError:
    """What to raise where a layer, a head or a place is asked for of statistics alone."""
    return RegardError(
        "there are no traces, only statistics, and these are of all places together",
        got=got,
        do=f"keep traces: {KEEP}",
    )


def _numbers(values: Tensor, digits: int) -> list[float | None]:
    found: list[float | None] = finite_or_null([round(v, digits) for v in values.tolist()])
    return found
