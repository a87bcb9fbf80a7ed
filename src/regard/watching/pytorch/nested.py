"""Nested tensors: sequences of several lengths, traced as one batch that is padded to the longest.

PyTorch answers such calls itself. The trace is made beside its answer: a place that is padding sees
nothing and is seen by nobody, so it counts in no statistic but that of empty rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard import masks
from regard.calls import dispatch
from regard.calls.watchers import learned
from regard.traces import Trace


class Padded(NamedTuple):
    """Queries, keys and values [B, H, N, D], and how many of each sequence are real."""

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]
    queries: list[int]
    keys: list[int]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Padded | None:
        """Of nested [B, H, n, D]; None if only some of them are nested. In the graph of autograd
        where that is wanted."""
        if not all(t.is_nested and t.dim() == 4 for t in (q, k, v)):
            return None
        return cls.of_lists(*((t if learned() else t.detach()).unbind() for t in (q, k, v)))

    @classmethod
    def of_lists(cls, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]) -> Padded:
        """Of lists of [H, n, D]."""
        queries, keys = ([t.shape[1] for t in part] for part in (q, k))
        return cls(_stacked(q), _stacked(k), _stacked(v), queries, keys)

    @property
    def square(self) -> bool:
        """Whether every sequence has as many queries as keys."""
        return self.queries == self.keys

    def trace(self, *, is_causal: bool = False, scale: float | None = None) -> Trace:
        real = torch.arange(self.q.shape[2]) < torch.tensor(self.queries)[:, None]
        mask = masks.keep(real[:, None, :, None].to(self.q.device)) & masks.padding(self.keys)
        if is_causal:
            mask = mask & masks.causal(offset=0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and learned()):
            return dispatch.trace(self.q, self.k, self.v, mask=mask, scale=scale)


def _stacked(parts: Sequence[Tensor]) -> Float[Tensor, "b h n d"]:
    longest = max(part.shape[1] for part in parts)
    pad = torch.nn.functional.pad
    return torch.stack([pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])
