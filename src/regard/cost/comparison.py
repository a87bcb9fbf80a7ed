"""Costs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regard.cost.costs import Cost
from regard.cost.tables import WIDTH, table
from regard.cost.units import counted, sized, timed
from regard.display import table_html
from regard.errors import RegardError


@dataclass(frozen=True)
class Comparison:
    """Several costs. Prints as one table, a column each."""

    costs: tuple[Cost, ...]

    def rows(self) -> list[list[str]]:
        """Labels and cells; what none of the costs has is left out."""
        costs = self.costs
        rows = [
            ["", *(c.name for c in costs)],
            ["tokens", *(f"{c.tokens:,}" for c in costs)],
            ["dtype", *(c.dtype for c in costs)],
            ["FLOPs needed", *(counted(c.flops()) for c in costs)],
            ["FLOPs executed", *(counted(c.flops("executed")) for c in costs)],
            ["FLOPs dense", *(counted(c.flops("dense")) for c in costs)],
            ["needed, training step", *(counted(c.flops(step="training")) for c in costs)],
            ["needed by pairs", *(f"{_of_pairs(c):.1%}" for c in costs)],
            ["most held, eager", *(sized(c.eager.peak) for c in costs)],
            ["most held, fused", *(sized(c.fused.peak) for c in costs)],
        ]
        if any(c.weights for c in costs):
            rows.append(["weights", *(sized(c.weights) if c.weights else "–" for c in costs)])
        if any(c.cache for c in costs):
            for label, field in (("cache, one token", 0), ("cache, this context", 1)):
                cells = ["–" if c.cache is None else sized(c.cache[field]) for c in costs]
                rows.append([label, *cells])
        return rows + self._rooflines()

    def _rooflines(self) -> list[list[str]]:
        costs = self.costs
        if not any(c.device for c in costs):
            return []
        rows = [
            ["at best on", *("–" if c.device is None else c.device.name for c in costs)],
            ["forward, fused", *(_time(c) for c in costs)],
        ]
        if any(c.decoding for c in costs):
            rows.append(["decoding, tokens/s", *(_decoded(c) for c in costs)])
        return rows

    def as_dict(self) -> dict[str, Any]:
        return {"costs": [c.as_dict() for c in self.costs]}

    def json(self) -> str:
        """Everything, as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        rows = self.rows()
        blocks: list[list[int]] = [[]]
        for column in range(1, len(rows[0])):
            wider = _columns(rows, [*blocks[-1], column])
            if blocks[-1] and max(map(len, table(wider).splitlines())) > WIDTH:
                blocks.append([])
            blocks[-1].append(column)
        return "\n\n".join(table(_columns(rows, block), rules=(1,)) for block in blocks)

    def _repr_html_(self) -> str:
        """All of them in one table, as the last line of a notebook's cell."""
        return table_html(self.rows(), header=True, numbers=True)


def compare(costs: Sequence[Cost]) -> Comparison:
    """Variants side by side.

    >>> from regard import cost
    >>> llama = cost.preset("llama-3-8b")
    >>> print(cost.compare([
    ...     cost.model(llama.but(name=f"{heads} key heads", key_heads=heads), "8k")
    ...     for heads in (32, 8, 1)
    ... ]))  # doctest: +ELLIPSIS
                             32 key heads  8 key heads  1 key heads
    ───────────────────────────────────────────────────────────────
      tokens                        8,192        8,192        8,192
    ...
      cache, one token            512 KiB      128 KiB     16.0 KiB
      cache, this context        4.00 GiB     1.00 GiB      128 MiB
    """
    found = tuple(costs)
    if not found or not all(isinstance(c, Cost) for c in found):
        raise RegardError(
            "compare takes costs",
            got=", ".join(type(c).__name__ for c in found) or "none",
            accepted="a list of what regard.cost.call, layer or model gave",
        )
    return Comparison(found)


def _columns(rows: list[list[str]], chosen: list[int]) -> list[list[str]]:
    return [[row[0], *(row[i] for i in chosen)] for row in rows]


def _of_pairs(c: Cost) -> float:
    return sum(p.flops() for p in c.parts if p.pairwise) / max(c.flops(), 1)


def _time(c: Cost) -> str:
    return "–" if c.device is None else timed(c.time().seconds)


def _decoded(c: Cost) -> str:
    return "–" if c.device is None or c.decoding is None else f"{c.tokens_per_second():,.1f}"
