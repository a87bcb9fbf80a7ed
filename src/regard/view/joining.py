"""The steps of generating a text, as the one trace that reading it whole would have given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from regard.backends.contract import Rows
from regard.inputs import AttentionInputs
from regard.traces import Trace
from regard.values import Shape

Edge = tuple[float, float]


def joined(traces: Sequence[Trace]) -> Trace | None:
    """One trace of the run that began a text and the steps that went on with it.

    The queries of each step stand below those before, their lse beside theirs; the keys are those
    of the last step. None where that would not be the same: a cache that let keys go, a mask that
    is no band, a bias.

    >>> import regard, torch
    >>> from regard import masks
    >>> q, k = torch.randn(2, 1, 2, 5, 4)
    >>> steps = [regard.trace(q[:, :, a:b], k[:, :, :b], k[:, :, :b], mask=masks.causal())
    ...          for a, b in ((0, 3), (3, 4), (4, 5))]
    >>> whole = joined(steps)
    >>> torch.allclose(whole.weights(), regard.trace(q, k, k, mask=masks.causal()).weights())
    True
    """
    first, last = traces[0].inputs, traces[-1].inputs
    given = traces[0].mask
    if given is None or not given.relative or first.bias is not None:
        return None
    B, H, _, N = last.shape
    bound = given.bind(Shape(B, H, N, N), first.q.device)
    edge = bound.band()
    if bound != first.mask or edge is None or edge[1] > 0:
        return None
    start = 0
    for trace in traces:
        x = trace.inputs
        if not (_alike(x, first) and _goes_on(x, last, start) and _sees(x, start, edge)):
            return None
        start += x.shape.Q
    q = torch.cat([trace.inputs.q for trace in traces], 2)
    rows = Rows(*(torch.cat(parts, 2) for parts in zip(*(t.rows for t in traces), strict=True)))
    inputs = replace(first, q=q, k=last.k, v=last.v, mask=bound)
    return replace(traces[0], inputs=inputs, rows=rows)


def _alike(x: AttentionInputs, first: AttentionInputs) -> bool:
    """Whether two calls compare queries with keys in the same way."""
    sinks = (x.sink, first.sink)
    return (
        (x.comparison, x.softcap, x.bias) == (first.comparison, first.softcap, first.bias)
        and x.dropout == first.dropout == 0
        and (x.q.shape[:2], x.q.shape[3:]) == (first.q.shape[:2], first.q.shape[3:])
        and (sinks[0] is sinks[1] or (None not in sinks and torch.equal(*sinks)))  # type: ignore[arg-type]
    )


def _goes_on(x: AttentionInputs, last: AttentionInputs, start: int) -> bool:
    """Whether a step's queries follow `start` others, and its keys are the first of the last's."""
    _, _, Q, K = x.shape
    return (
        start + Q == K and torch.equal(x.k, last.k[:, :, :K]) and torch.equal(x.v, last.v[:, :, :K])
    )


def _sees(x: AttentionInputs, start: int, edge: Edge) -> bool:
    """Whether each query of a step sees the keys that a band over the whole text shows it."""
    own = (-math.inf, math.inf) if x.mask is None else x.mask.band()
    if own is None:
        return False
    _, _, Q, K = x.shape

    def keys(band: Edge, at: int) -> Edge:
        return max(0, at + band[0]), min(K - 1, at + band[1])

    return all(keys(own, row) == keys(edge, start + row) for row in range(Q))
