"""How evenly a layout shares the pairs of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.masks.tiles import count
from regard.parallel.call import Call
from regard.parallel.placed_masks import SomeKeys, placed_mask


def busiest(call: Call) -> float:
    """The pairs of the rank that has most, where each has its queries, over their mean."""
    every = _pairs(call, [None])[:, 0]
    return float(every.max() * len(every) / every.sum().clamp_min(1))


def busiest_round(call: Call) -> float:
    """The same where keys go round: at every step all wait for the rank that has most."""
    W, device = call.ranks.size, call.inputs.q.device
    owners = [
        SomeKeys(call.key_layout.positions(owner, device), call.key_layout.length)
        for owner in range(W)
    ]
    every = _pairs(call, owners)
    rank = torch.arange(W)
    steps = [every[rank, (rank - step) % W].max() for step in range(W)]
    return float(sum(steps) * W / every.sum().clamp_min(1))


def _pairs(call: Call, keys: Sequence[SomeKeys | None]) -> Float[Tensor, "w parts"]:
    """For each rank, how many pairs its queries make with some keys."""
    device, mask = call.inputs.q.device, call.inputs.mask
    spans = None if mask is None else mask.spans(call.shape, device)
    known = spans is not None and bool(spans.sure)
    found = torch.zeros(call.ranks.size, len(keys), dtype=torch.float64)
    for i, some in enumerate(keys):
        m = call.shape.K if some is None else len(some.places)
        seen = _seen(spans[:2], some) if spans is not None and known else None
        for rank, n in enumerate(call.layout.lengths):
            if mask is None or not n or not m:
                found[rank, i] = n * m
                continue
            queries = call.layout.positions(rank, device)
            if seen is not None:
                found[rank, i] = float(seen[queries].sum())
                continue
            own = placed_mask(mask, queries, call.shape.Q, None, some)
            assert own is not None
            shape = call.shape._replace(B=own.batch, H=own.heads, Q=n, K=m)
            found[rank, i] = count(own, shape, device)
    return found


def _seen(runs: tuple[Tensor, ...], some: SomeKeys | None) -> Int[Tensor, "q"]:
    """How many of some keys each query sees, over batch entries and heads, where it sees runs."""
    first, stop = (edge.contiguous() for edge in runs)
    if some is not None:
        first, stop = (torch.searchsorted(some.places, edge) for edge in (first, stop))
    return (stop - first).clamp_min(0).sum((0, 1))
