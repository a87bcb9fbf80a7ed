"""Masks under which each query sees one run of keys: bands, documents, prefixes, padding, and what
they make together. Kernels need only the ends of such runs, not a look at every pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.values import Shape


class Spans(NamedTuple):
    """For each query the first key that it sees, and the first behind them; equal where it sees
    none. [b or 1, h or 1, Q]."""

    first: Int[Tensor, "b h q"]
    stop: Int[Tensor, "b h q"]
    sure: Bool[Tensor, ""]
    """Whether the mask is that. Numbers in tensors decide, so a card may not know yet."""


def of_band(band: tuple[float, float], shape: Shape, device: torch.device) -> Spans:
    q = torch.arange(shape.Q, device=device)
    low, high = (int(max(-shape.Q - 1, min(edge, shape.K))) for edge in band)
    return _ordered((q + low)[None, None], (q + high + 1)[None, None], _true(device), shape)


def of_limits(limits: Tensor | int, shape: Shape, device: torch.device) -> Spans:
    """The keys before a limit, one for all or one for each batch entry."""
    limits = torch.as_tensor(limits, device=device).to(torch.int64).reshape(-1, 1, 1)
    stop = limits.expand(-1, 1, shape.Q)
    return _ordered(torch.zeros_like(stop), stop, _true(device), shape)


def of_ids(ids: Int[Tensor, "b k"], offset: int, shape: Shape) -> Spans:
    """The keys that have the id of the key where a query stands: a run, if no id comes again."""
    place = torch.arange(shape.K, device=ids.device)
    fresh = torch.ones_like(ids, dtype=torch.bool)
    fresh[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = torch.where(fresh, place, 0).cummax(-1).values
    final = torch.ones_like(fresh)
    final[:, :-1] = fresh[:, 1:]
    stop = torch.where(final, place + 1, shape.K).flip(-1).cummin(-1).values.flip(-1)
    ranked = ids.sort(-1).values
    apart = (ranked[:, 1:] != ranked[:, :-1]).sum(-1)
    sure = (fresh[:, 1:].sum(-1) == apart).all()
    mine = slice(offset, offset + shape.Q)
    return Spans(first[:, None, mine], stop[:, None, mine], sure)


def of_table(table: Bool[Tensor, "b h q k"], shape: Shape) -> Spans:
    """The keys from the first to the last that a row of booleans allows, if it allows all those
    between them."""
    table = table.expand(*table.shape[:2], shape.Q, shape.K)
    seen = table.sum(-1)
    if not shape.K:
        return Spans(seen, seen, _true(table.device))
    numbers = table.to(torch.int8)
    first = torch.where(seen > 0, numbers.argmax(-1), 0)
    stop = torch.where(seen > 0, shape.K - numbers.flip(-1).argmax(-1), 0)
    return Spans(first, stop, (stop - first == seen).all())


def met(one: Spans, other: Spans) -> Spans:
    """The keys in both runs."""
    first, stop = torch.maximum(one.first, other.first), torch.minimum(one.stop, other.stop)
    return Spans(first, torch.maximum(first, stop), one.sure & other.sure)


def joined(one: Spans, other: Spans) -> Spans:
    """The keys in either run, if there is no gap between them."""
    no_one, no_other = one.first >= one.stop, other.first >= other.stop
    first = torch.minimum(one.first, other.first)
    stop = torch.maximum(one.stop, other.stop)
    first = torch.where(no_one, other.first, torch.where(no_other, one.first, first))
    stop = torch.where(no_one, other.stop, torch.where(no_other, one.stop, stop))
    gap = torch.maximum(one.first, other.first) > torch.minimum(one.stop, other.stop)
    whole = ~(gap & ~no_one & ~no_other).any()
    return Spans(first, stop, one.sure & other.sure & whole)


def rest_of(seen: Spans, shape: Shape) -> Spans:
    """The keys outside a run, if it begins with the first key or ends with the last."""
    nothing = seen.first >= seen.stop
    ends = nothing | (seen.stop == shape.K)
    first = torch.where(ends, 0, seen.stop)
    stop = torch.where(nothing, shape.K, torch.where(ends, seen.first, shape.K))
    return Spans(first, stop, seen.sure & (ends | (seen.first == 0)).all())


def _ordered(first: Tensor, stop: Tensor, sure: Tensor, shape: Shape) -> Spans:
    first, stop = first.clamp(0, shape.K), stop.clamp(0, shape.K)
    return Spans(first, torch.maximum(first, stop), sure)


def _true(device: torch.device) -> Bool[Tensor, ""]:
    return torch.ones((), dtype=torch.bool, device=device)
