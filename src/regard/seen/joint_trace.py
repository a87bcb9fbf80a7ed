"""The steps of generating a text, as the one trace that reading it whole would have given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.inputs import AttentionInputs
from regard.masks.algebra import And, Mask, pairs
from regard.masks.keep import Keep
from regard.masks.prefix import Prefix
from regard.traces import Trace
from regard.values import Shape

Edge = tuple[float, float]


def joined(traces: Sequence[Trace]) -> Trace | None:
    """One trace of the run that began a text and the steps that went on with it.

    The queries of each step stand below those before, their lse beside theirs, and so do the keys,
    which a cache may have let go since. Steps that look at the keys of another text have them in
    common. None where that would not be the same: a mask that is neither a band nor padding, keys
    that changed, a bias.

    >>> import regard, torch
    >>> from regard import masks
    >>> q, k = torch.randn(2, 1, 2, 5, 4)
    >>> steps = [regard.trace(q[:, :, a:b], k[:, :, :b], k[:, :, :b], mask=masks.causal())
    ...          for a, b in ((0, 3), (3, 4), (4, 5))]
    >>> whole = joined(steps)
    >>> torch.allclose(whole.weights(), regard.trace(q, k, k, mask=masks.causal()).weights())
    True
    """
    first = traces[0].inputs
    seen = [_Seen.of(trace.inputs) for trace in traces]
    parts = [part for part in seen if part is not None]
    alike = all(_alike(trace.inputs, first) for trace in traces)
    if len(parts) < len(traces) or first.bias is not None or not alike:
        return None
    inputs = _of_another_text(traces, parts) or _of_one_text(traces, parts)
    if inputs is None:
        return None
    rows = Rows(*(torch.cat(parts, 2) for parts in zip(*(t.rows for t in traces), strict=True)))
    return replace(traces[0], inputs=inputs[0], rows=rows, mask=inputs[1])


class _Seen(NamedTuple):
    """Which keys the queries of a call see: those in a band around each, and of these the real."""

    edge: Edge
    real: Bool[Tensor, "b h 1 k"]

    @classmethod
    def of(cls, x: AttentionInputs) -> _Seen | None:
        device, keys = x.q.device, torch.arange(x.shape.K, device=x.q.device)
        edge, real = (-math.inf, math.inf), torch.ones(1, 1, 1, len(keys), dtype=torch.bool)
        real = real.to(device)
        for part in () if x.mask is None else _parts(x.mask):
            band = part.band()
            if band is not None:
                edge = max(edge[0], band[0]), min(edge[1], band[1])
            elif isinstance(part, Prefix) or (isinstance(part, Keep) and part.table.shape[2] == 1):
                real = real & pairs(part, keys[:1], keys)
            else:
                return None
        return cls(edge, real)


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.left), *_parts(mask.right)] if isinstance(mask, And) else [mask]


Whole = tuple[AttentionInputs, Mask | None]


def _of_another_text(traces: Sequence[Trace], seen: Sequence[_Seen]) -> Whole | None:
    """Of queries that each see the same keys."""
    first = traces[0].inputs
    for trace, here in zip(traces, seen, strict=True):
        x = trace.inputs
        same = x.shape.K == first.shape.K and torch.equal(here.real, seen[0].real)
        if here.edge != (-math.inf, math.inf) or not same:
            return None
        if not (torch.equal(x.k, first.k) and torch.equal(x.v, first.v)):
            return None
    return replace(first, q=torch.cat([trace.inputs.q for trace in traces], 2)), traces[0].mask


def _of_one_text(traces: Sequence[Trace], seen: Sequence[_Seen]) -> Whole | None:
    """Of queries that see keys before them, in a band that is the same for all."""
    first, given = traces[0].inputs, traces[0].mask
    bands = [] if given is None else [part for part in _parts(given) if part.relative]
    if not bands:
        return None
    q = torch.cat([trace.inputs.q for trace in traces], 2)
    B, H, N, _ = q.shape
    band = reduce(And, bands)
    bound = band.bind(Shape(B, H, N, N), q.device)
    edge = bound.band()
    if edge is None or edge[1] > 0 or edge != seen[0].edge:
        return None
    lengths = [trace.inputs.shape.Q for trace in traces]
    k = _all([trace.inputs.k for trace in traces], lengths)
    v = _all([trace.inputs.v for trace in traces], lengths)
    if k.shape[2] != N:
        return None
    tables = (
        here.real[..., -Q:].expand(B, -1, 1, -1) for here, Q in zip(seen, lengths, strict=True)
    )
    real = torch.cat(list(tables), -1)
    mask = band if bool(real.all()) else band & Keep(real)
    whole = mask.bind(Shape(B, H, N, N), q.device)
    inputs = replace(first, q=q, k=k, v=v, mask=whole)
    start = 0
    for trace, here in zip(traces, seen, strict=True):
        x = trace.inputs
        gone = _behind(x, start)
        same = torch.equal(here.real.expand(B, -1, 1, -1), real[..., gone : gone + x.shape.K])
        if not (_holds(x, inputs, start) and same and _sees(x, here.edge, start, edge)):
            return None
        start += x.shape.Q
    return inputs, mask


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


def _sees(x: AttentionInputs, own: Edge, start: int, edge: Edge) -> bool:
    """Whether each query of a step sees the keys that a band over the whole text shows it."""
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
