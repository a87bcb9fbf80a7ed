"""How far the logits of a head are from one another: what tells whether their scale is right.

The variance of a row needs no pass over the pairs where logits are scaled products and the mask is
a band. With C the sum of (k - m)(k - m)ᵀ over the keys that a query sees, and m the mean of all
keys, which no variance notices,

    Σ (s - mean)² = scale² · (qᵀ C q - (q · Σ (k - m))² / n),

and prefix sums of C, a chunk of keys at a time, serve all queries in O(n d²). The least logit has
no such formula: each pair has to be looked at, which is done if it is asked for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard.inputs import AttentionInputs
from regard.monitoring.telemetry import as_masked
from regard.scores.comparison import Dot
from regard.seen import Span, open_places, outline_of
from regard.traces import Trace

HELD = 1 << 23
"""Numbers of queries whose logits are summed at a time."""


class HeadSpread(NamedTuple):
    """Of each head, [H]."""

    variance: Float[Tensor, "h"]
    """The variance of a row's logits around their mean (by n - 1), summed over rows that see two
    keys or more, and nothing broken."""
    choosing: Float[Tensor, "h"]
    """How many rows these are."""
    lowest: Float[Tensor, "h"]
    """The least logit; inf if that was not asked."""

    @staticmethod
    @torch.no_grad()
    def of(trace: Trace, *, walk: bool) -> HeadSpread:
        """Of one call. With `walk`, from a pass over the pairs, whatever mask and score are."""
        x, lse = as_masked(trace.inputs), trace.rows.plain().lse
        seeing = trace.rows.max_logit.isfinite()
        with torch.autocast(x.q.device.type, enabled=False):
            if walk:
                spread = trace.second_pass.logit_spread(x)
                many = (open_places(x) - int(x.sink is not None)).to(lse.dtype)
                around = spread.variance * many
                least = spread.lowest.masked_fill(~seeing, math.inf)
                lowest = F.pad(least, (0, 1, 0, 0, 0, 1), value=math.inf).amin((0, 2))
            else:
                found = squares_of_band(x)
                nothing = HeadSpread.nothing(lse.new_zeros(lse.shape[1]))
                if found is None:
                    return nothing
                (around, many), lowest = found, nothing.lowest
            choosing = seeing & (many > 1)
            rows = (around / (many - 1).clamp_min(1)).masked_fill(~choosing, 0.0)
            counted = choosing.sum((0, 2)).to(lse.dtype)
            return HeadSpread(rows.sum((0, 2)).to(lse.dtype), counted, lowest.to(lse.dtype))

    @staticmethod
    def nothing(like: Float[Tensor, "h"]) -> HeadSpread:
        """Of no rows: what changes no sum."""
        zeros = torch.zeros_like(like)
        return HeadSpread(zeros, zeros, torch.full_like(like, math.inf))

    def plus(self, other: HeadSpread) -> HeadSpread:
        """With another call of the same layer."""
        added = self.variance + other.variance, self.choosing + other.choosing
        return HeadSpread(*added, torch.minimum(self.lowest, other.lowest))


def squares_of_band(
    x: AttentionInputs,
) -> tuple[Float[Tensor, "b h q"], Float[Tensor, "some one q"]] | None:
    """Each row's Σ (s - mean)², and of how many keys. None where logits are more than scaled
    products, or the mask is no band.

    Keys that are not finite count as 0: who sees them is not asked."""
    outline = outline_of(x.mask)
    plain = isinstance(x.comparison, Dot) and x.bias is None and x.softcap is None
    if outline is None or not plain or not x.shape.K or not x.shape.Q:
        return None
    assert isinstance(x.comparison, Dot)
    band, span = outline.band, Span.of(outline, x)
    dtype = x.compute_dtype
    real = None if span.real is None else span.real[:, None].to(dtype)
    # Some key heads after the others: all that is held beside them is several times as large.
    heads = max(1, HELD // max(1, x.q[:, : x.group].numel()))
    q = x.q.unflatten(1, (-1, x.group))
    parts = [
        _sums(q[:, i : i + heads].to(dtype), x.k[:, i : i + heads].to(dtype), real, band)
        for i in range(0, x.k.shape[1], heads)
    ]
    square, total = torch.cat(parts, 2).flatten(2, 3)
    many = span.many.to(dtype)
    around = square - total.square() / many.clamp_min(1)
    # Rounding may leave a little less than nothing.
    return around.clamp_min(0) * x.comparison.scale**2, many


def _sums(
    q: Float[Tensor, "b g r q d"],
    k: Float[Tensor, "b g k d"],
    real: Float[Tensor, "b one k"] | None,
    band: tuple[float, float],
) -> Float[Tensor, "two b g r q"]:
    """Σ (q·k)² and Σ q·k of each row, of keys around their mean."""
    k = k.nan_to_num(0.0, 0.0, 0.0)
    real = torch.ones_like(k[:, :1, :, 0]) if real is None else real
    middle = (k * real[..., None]).sum(2) / real.sum(2).clamp_min(1)[..., None]
    k = (k - middle[:, :, None]) * real[..., None]
    sums = _until(q, k, band[1])
    if band[0] > -q.shape[3]:
        sums = sums - _until(q, k, band[0] - 1)
    return sums


def _until(
    q: Float[Tensor, "b g r q d"], k: Float[Tensor, "b g k d"], last: float
) -> Float[Tensor, "two b g r q"]:
    """Σ (q·k)² and Σ q·k over the keys that stand at most `last` places after the query.

    Keys that every query sees are summed before the first chunk; the others are cut so that a query
    has its last key in the chunk of its own number, where pairs are compared one by one."""
    Q, K, D = q.shape[3], k.shape[2], q.shape[-1]
    after = int(max(min(last, K - 1), -Q)) + 1
    first = _moments(k[:, :, : max(after, 0)])[:, :, None]
    if after == K:
        seen = q @ first
        return torch.stack([(seen[..., :-1] * q).sum(-1), seen[..., -1]])
    # Query i sees the i first of the keys that are left, none of them real before the first is.
    size = max(32, D)
    queries = F.pad(q, (0, 0, 0, -Q % size)).unflatten(3, (-1, size))
    many = queries.shape[3] * size
    late = F.pad(k[:, :, max(after, 0) :], (0, 0, max(-after, 0), 0))[:, :, :many]
    chunks = F.pad(late, (0, 0, 0, many - late.shape[2])).unflatten(2, (-1, size))
    states = torch.cat([first, _moments(chunks)], 2).cumsum(2)[:, :, None, :-1]
    seen = queries @ states
    near = (queries @ chunks[:, :, None].mT).tril(-1)
    square = (seen[..., :-1] * queries).sum(-1) + near.square().sum(-1)
    total = seen[..., -1] + near.sum(-1)
    return torch.stack([square, total]).flatten(-2)[..., :Q]


def _moments(k: Float[Tensor, "*some k d"]) -> Float[Tensor, "*some d e"]:
    """Σ k kᵀ, and Σ k as one more column."""
    return k.mT @ F.pad(k, (0, 1), value=1.0)
