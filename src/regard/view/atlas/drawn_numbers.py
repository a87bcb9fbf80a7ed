"""The numbers that a drawing of a trace shows, and no more than those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.masks.algebra import pairs
from regard.traces import Trace, places

CAP = 60
"""A text of more places than these is pooled, or drawn in part."""
STRONGEST, NEAR, FAINT = 8, 2, 0.005


@dataclass(frozen=True)
class Figures:
    """One head, or the mean of some, in rows × columns cells. A pooled cell holds its largest
    weight."""

    weights: list[list[float]]
    seen: list[list[bool]]
    entropy: list[float]
    strongest: list[tuple[int, float]]
    """Key and weight for each query, -1 for one that sees nothing; empty where cells are pooled."""
    received: list[float]


def figures(trace: Trace, rows: int, columns: int) -> Figures:
    """The numbers of one batch entry, the mean over its heads, pooled into so many cells.

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
    strongest: list[tuple[int, float]] = []
    if (rows, columns) != (Q, K):
        weights = trace.map((rows, columns), pool="max").reshape(-1, rows, columns).mean(0)
        seen = weights != 0
    else:
        weights = trace.weights().reshape(-1, rows, columns).mean(0)
        seen = allowed(trace, range(rows))
        most, key = weights.max(-1)
        key = torch.where(seen.any(-1).to(key.device), key, -1)
        strongest = list(zip(key.tolist(), most.tolist(), strict=True))
    entropy = trace.entropy.reshape(-1, Q).mean(0)
    received = trace.received().reshape(-1, K).mean(0)
    return Figures(
        weights.tolist(),
        seen.tolist(),
        [float(entropy[start:stop].mean()) for start, stop in runs(Q, rows)],
        strongest,
        [float(received[start:stop].sum()) for start, stop in runs(K, columns)],
    )


def given(trace: Trace, query: int) -> list[float | None]:
    """What one query gives each key, the mean over heads; None where it may not look."""
    query = int(places(query, trace.inputs.shape.Q, "queries", trace.inputs.q.device))
    weights = trace.weights(queries=[query]).reshape(-1, trace.inputs.shape.K).mean(0)
    return _where(weights, allowed(trace, [query])[0])


def got(trace: Trace, key: int) -> list[float | None]:
    """What one key gets from each query, the mean over heads; None where it is not seen."""
    _, _, Q, K = trace.inputs.shape
    key = int(places(key, K, "keys", trace.inputs.q.device))
    weights = trace.weights(keys=[key]).reshape(-1, Q).mean(0)
    return _where(weights, allowed(trace, range(Q), [key])[:, 0])


def _where(weights: Tensor, seen: Tensor) -> list[float | None]:
    pairs = zip(weights.tolist(), seen.tolist(), strict=True)
    return [weight if shown else None for weight, shown in pairs]


def worth_showing(weights: Sequence[float | None], always: Sequence[int] = ()) -> list[int]:
    """The places of a long text that matter: the strongest with their neighbours.

    >>> worth_showing([0.0] * 50 + [1.0] + [0.0] * 50)
    [48, 49, 50, 51, 52]
    """
    heard = [place for place, weight in enumerate(weights) if (weight or 0.0) >= FAINT]
    strongest = sorted(heard, key=lambda place: -(weights[place] or 0.0))[:STRONGEST]
    near = {p + step for p in (*strongest, *always) for step in range(-NEAR, NEAR + 1)}
    return sorted(near.intersection(range(len(weights))))


def runs(places: int, cells: int) -> list[tuple[int, int]]:
    """Which places each cell of a pooled axis holds, as `Trace.map` divides them.

    >>> runs(5, 2)
    [(0, 3), (3, 5)]
    """
    return list(pairwise(-(-cell * places // max(cells, 1)) for cell in range(cells + 1)))


def allowed(
    trace: Trace, queries: Sequence[int], keys: Sequence[int] | None = None
) -> Bool[Tensor, "q k"]:
    """Which keys some queries may see, in any head."""
    x = trace.inputs
    device = x.q.device
    q = torch.tensor(list(queries), dtype=torch.long, device=device)
    k = torch.arange(x.shape.K, device=device)
    if keys is not None:
        k = k[list(keys)]
    if x.mask is None:
        return torch.ones(len(q), len(k), dtype=torch.bool)
    return pairs(x.mask, q, k)[0].any(0)
