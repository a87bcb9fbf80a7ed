"""For each query, the keys that match it, such as those of the same token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor


class MatchingKeys(NamedTuple):
    """Keys sorted by kind, so that those that match a query are adjacent. Queries are sorted alike,
    those without a match last."""

    keys: Int[Tensor, "b k"]
    rows: Int[Tensor, "b q"]
    begins: Int[Tensor, "b q"]
    """Of each of `rows`: its first key among `keys`, and the first that is not its own."""
    ends: Int[Tensor, "b q"]


def matching_keys(
    asks: Int[Tensor, "b q"], holds: Int[Tensor, "b k"], *, earlier: bool
) -> MatchingKeys:
    """From the kind that each query looks for and the kind of each key. With `earlier`, only keys
    before the query's own place match; queries are the last places of the keys."""
    Q, K = asks.shape[1], holds.shape[1]
    key, query = (torch.arange(n, device=asks.device) for n in (K, Q))
    ranks, keys = (holds.long() * K + key).sort(1)
    least = asks.long() * K
    most = least + ((query + K - Q).clamp(0, K) if earlier else K)
    begins, ends = (torch.searchsorted(ranks, edge.contiguous()) for edge in (least, most))
    rows = torch.where(ends > begins, begins, K).argsort(1)
    begins, ends = begins.gather(1, rows), ends.gather(1, rows)
    return MatchingKeys(*(t.to(torch.int32) for t in (keys, rows, begins, ends)))
