"""The numbers that a drawing of a trace shows, and no more than those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.masks.algebra import pairs
from regard.traces import Trace


@dataclass(frozen=True)
class Figures:
    """One head in rows × columns cells. A pooled cell holds its largest weight."""

    weights: list[list[float]]
    seen: list[list[bool]]
    entropy: list[float]
    strongest: list[tuple[int, float]]
    """Key and weight for each query; empty when queries are pooled."""
    received: list[float]


def figures(trace: Trace, rows: int, columns: int) -> Figures:
    """The numbers of a trace of one head, pooled into so many cells.

    >>> import regard, torch
    >>> x = torch.zeros(4, 2)
    >>> shown = figures(regard.trace(x, x, x, mask=regard.masks.causal()), 2, 2)
    >>> torch.tensor(shown.weights)
    tensor([[1.0000, 0.0000],
            [0.3333, 0.3333]])
    >>> shown.seen, torch.tensor(shown.received)
    ([[True, False], [True, True]], tensor([3.1667, 0.8333]))
    """
    trace = trace.detach()
    _, _, Q, K = trace.inputs.shape
    pooled = (rows, columns) != (Q, K)
    if pooled:
        weights = trace.map((rows, columns), pool="max").reshape(rows, columns)
        seen = weights != 0
        strongest = []
    else:
        weights = trace.weights().reshape(rows, columns)
        seen = allowed(trace, range(rows))
        top = trace.top(1)
        strongest = list(
            zip(top.indices.flatten().tolist(), top.values.flatten().tolist(), strict=True)
        )
    entropy, received = trace.entropy.flatten(), trace.received().flatten()
    return Figures(
        weights.tolist(),
        seen.tolist(),
        [float(entropy[start:stop].mean()) for start, stop in runs(Q, rows)],
        strongest,
        [float(received[start:stop].sum()) for start, stop in runs(K, columns)],
    )


def runs(places: int, cells: int) -> list[tuple[int, int]]:
    """Which places each cell of a pooled axis holds, as `Trace.map` divides them.

    >>> runs(5, 2)
    [(0, 3), (3, 5)]
    """
    return list(pairwise(-(-cell * places // max(cells, 1)) for cell in range(cells + 1)))


def allowed(trace: Trace, queries: Sequence[int]) -> Bool[Tensor, "q k"]:
    """Which keys some queries of one head may see."""
    x = trace.inputs
    q = torch.tensor(list(queries), dtype=torch.long, device=x.q.device)
    k = torch.arange(x.shape.K, device=x.q.device)
    if x.mask is None:
        return torch.ones(len(q), len(k), dtype=torch.bool)
    return pairs(x.mask, q, k)[0, 0]
