"""The steps of generating a text, as the one trace that reading it whole would have given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.inputs import AttentionInputs
from regard.traces import Trace
from regard.values import Shape
from regard.watching.seen import Seen

Edge = tuple[float, float]


def joined(traces: Sequence[Trace]) -> Trace | None:
    """One trace of the run that began a text and the steps that went on with it.

    The queries of each step stand below those before, their lse beside theirs, and so do the keys,
    which a cache may have let go since. None where that would not be the same: a mask that is no
    band, keys that changed, a bias.

    >>> import regard, torch
    >>> from regard import masks
    >>> q, k = torch.randn(2, 1, 2, 5, 4)
    >>> steps = [regard.trace(q[:, :, a:b], k[:, :, :b], k[:, :, :b], mask=masks.causal())
    ...          for a, b in ((0, 3), (3, 4), (4, 5))]
    >>> whole = joined(steps)
    >>> torch.allclose(whole.weights(), regard.trace(q, k, k, mask=masks.causal()).weights())
    True
    """
    first, given = traces[0].inputs, traces[0].mask
    if given is None or not given.relative or first.bias is not None:
        return None
    if not all(_alike(trace.inputs, first) for trace in traces):
        return None
    q = torch.cat([trace.inputs.q for trace in traces], 2)
    B, H, N, _ = q.shape
    bound = given.bind(Shape(B, H, N, N), q.device)
    edge = bound.band()
    if bound != first.mask or edge is None or edge[1] > 0:
        return None
    lengths = [trace.inputs.shape.Q for trace in traces]
    k = _all([trace.inputs.k for trace in traces], lengths)
    v = _all([trace.inputs.v for trace in traces], lengths)
    if k.shape[2] != N:
        return None
    inputs = replace(first, q=q, k=k, v=v, mask=bound)
    start = 0
    for trace in traces:
        x = trace.inputs
        if not (_holds(x, inputs, start) and _sees(x, start, edge)):
            return None
        start += x.shape.Q
    rows = Rows(*(torch.cat(parts, 2) for parts in zip(*(t.rows for t in traces), strict=True)))
    return replace(traces[0], inputs=inputs, rows=rows)


class Folding:
    """Joins the steps of a text while it is written, so that its keys are held once.

    Call it after each run of the model. `starts` tells the first query of each step that was
    joined, by the path of the layer.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.starts: dict[str, list[int]] = {}

    def __call__(self) -> None:
        for path, layer in self.seen.items():
            # A layer that could not be joined once has more traces than these.
            whole = joined(layer.traces[:]) if len(layer.traces) == 2 else None
            if whole is not None:
                before = layer.traces[0].inputs.shape.Q
                self.starts.setdefault(path, [0]).append(before)
                layer.traces = [whole]
                del layer.runs[1:], layer.steps[1:]


def let_go(traces: Sequence[Trace]) -> bool:
    """Whether keys went between steps, so that a key is no longer in the column of its place."""
    for before, after in pairwise(trace.inputs for trace in traces):
        kept, had = after.shape.K - after.shape.Q, before.shape.K
        if 0 < kept < had and torch.equal(after.k[:, :, :kept], before.k[:, :, had - kept :]):
            return True
    return False


def _alike(x: AttentionInputs, first: AttentionInputs) -> bool:
    """Whether two calls compare queries with keys in the same way."""
    sinks = (x.sink, first.sink)
    return (
        (x.comparison, x.softcap, x.bias) == (first.comparison, first.softcap, first.bias)
        and x.dropout == first.dropout == 0
        and all(
            (a.shape[:2], a.shape[3]) == (b.shape[:2], b.shape[3])
            for a, b in ((x.q, first.q), (x.k, first.k), (x.v, first.v))
        )
        and (sinks[0] is sinks[1] or (None not in sinks and torch.equal(*sinks)))  # type: ignore[arg-type]
    )


def _all(parts: list[Tensor], lengths: list[int]) -> Float[Tensor, "b g n d"]:
    """The keys or values of the whole text: those of the last step if it has them all, else those
    that each step added."""
    if parts[-1].shape[2] == sum(lengths):
        return parts[-1]
    return torch.cat([part[:, :, -Q:] for part, Q in zip(parts, lengths, strict=True)], 2)


def _behind(x: AttentionInputs, start: int) -> int:
    """How many keys a cache let go before a step whose queries follow `start` others."""
    return start + x.shape.Q - x.shape.K


def _holds(x: AttentionInputs, whole: AttentionInputs, start: int) -> bool:
    """Whether the keys and values of a step are those of the whole text that end with it."""
    gone = _behind(x, start)
    here = slice(gone, gone + x.shape.K)
    return (
        gone >= 0
        and torch.equal(x.k, whole.k[:, :, here])
        and torch.equal(x.v, whole.v[:, :, here])
    )


def _sees(x: AttentionInputs, start: int, edge: Edge) -> bool:
    """Whether each query of a step sees the keys that a band over the whole text shows it."""
    own = (-math.inf, math.inf) if x.mask is None else x.mask.band()
    if own is None:
        return False
    _, _, Q, K = x.shape
    gone = _behind(x, start)
    if own == edge and start == gone == 0:
        return True

    def keys(band: Edge, at: int, first: int, last: int) -> Edge:
        return max(first, at + band[0]), min(last, at + band[1])

    return all(
        keys((own[0] + gone, own[1] + gone), row, gone, gone + K - 1)
        == keys(edge, start + row, 0, gone + K - 1)
        for row in range(Q)
    )
