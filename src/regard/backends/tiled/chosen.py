"""Logits of chosen queries and keys, made of differentiable operations."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.poison import finite
from regard.inputs import AttentionInputs
from regard.masks.algebra import pairs


def chosen_logits(
    x: AttentionInputs, queries: Int[Tensor, "q"], keys: Int[Tensor, "k"]
) -> Float[Tensor, "b h q k"]:
    """Logits of chosen queries and keys; minus infinity where a pair is masked."""
    return logits_at(x, x.q[:, :, queries], queries, keys)


def logits_at(
    x: AttentionInputs,
    q: Float[Tensor, "b h q d"],
    queries: Int[Tensor, "q"],
    keys: Int[Tensor, "k"],
) -> Float[Tensor, "b h q k"]:
    """The same, where the vectors of the queries are at hand."""
    q, k = q.to(x.compute_dtype), x.k[:, :, keys].to(x.compute_dtype)
    broken = _broken(q)[..., None] | _broken(k).repeat_interleave(x.group, dim=1)[..., None, :]
    learned = torch.is_grad_enabled()
    if learned:
        # What is not finite stays in its own pair, but would spoil the gradients of others.
        q, k = finite(q), finite(k)
    s = x.comparison.logits(q.unflatten(1, (-1, x.group)), k).flatten(1, 2)
    if x.softcap is not None:
        s = x.softcap * torch.tanh(s / x.softcap)
    # Added, NaN reaches the gradients of its own pair.
    nan = torch.zeros_like(s).masked_fill_(broken, math.nan) if learned else None
    s = s.masked_fill(broken, math.nan) if nan is None else s + nan
    if x.bias is not None:
        s = s + x.bias.at(queries, keys).to(s.dtype)
    return s if x.mask is None else s.masked_fill(~pairs(x.mask, queries, keys), -math.inf)


def _broken(vectors: Float[Tensor, "b h n d"]) -> Bool[Tensor, "b h n"]:
    """Which vectors hold NaN or infinity. The largest number of each says so in one pass."""
    if not vectors.shape[-1]:
        return vectors.new_zeros(vectors.shape[:-1], dtype=torch.bool)
    largest: Tensor = torch.linalg.vector_norm(vectors.detach(), math.inf, -1)
    return ~largest.isfinite()
