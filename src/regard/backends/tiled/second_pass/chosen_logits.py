"""Logits of chosen queries and keys, made of differentiable operations."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.poison import finite
from regard.inputs import AttentionInputs
from regard.masks.algebra import pairs
from regard.transforms import transformed


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
    broken, learned = _broken(q)[..., None], torch.is_grad_enabled()
    true = k
    if learned:
        # What is not finite stays in its own pair, but would spoil the gradients of others.
        q, k = finite(q), finite(k)
    s = _compared(x, q, k)
    if numbers_alone(s):
        return _finished_in_place(x, s, broken, queries, keys)
    s = _capped(x, s)
    if learned:
        # A key's logits are what arithmetic makes of it, as in the pass that gave the sums.
        odd = _broken(true).repeat_interleave(x.group, dim=1)[..., None, :]
        arithmetic = _capped(x, _compared(x, q, true.detach()))
        s = s + torch.where(odd, arithmetic - s, 0.0).detach()
    # A query has none if it is not finite. Added, NaN reaches the gradients of its own pair.
    nan = torch.zeros_like(s).masked_fill_(broken, math.nan) if learned else None
    s = s.masked_fill(broken, math.nan) if nan is None else s + nan
    if x.bias is not None:
        s = s + x.bias.at(queries, keys).to(s.dtype)
    return s if x.mask is None else s.masked_fill(~pairs(x.mask, queries, keys), -math.inf)


def _compared(
    x: AttentionInputs, q: Float[Tensor, "b h q d"], k: Float[Tensor, "b g k d"]
) -> Float[Tensor, "b h q k"]:
    return x.comparison.logits(q.unflatten(1, (-1, x.group)), k).flatten(1, 2)


def _capped(x: AttentionInputs, s: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    return s if x.softcap is None else x.softcap * torch.tanh(s / x.softcap)


def numbers_alone(s: Tensor) -> bool:
    """Whether a tensor is numbers and nothing else, so that it may be written over."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed([s]))


def _finished_in_place(
    x: AttentionInputs,
    s: Float[Tensor, "b h q k"],
    broken: Bool[Tensor, "b h q 1"],
    queries: Int[Tensor, "q"],
    keys: Int[Tensor, "k"],
) -> Float[Tensor, "b h q k"]:
    """The same without a copy at every step: copies take longer than the products."""
    if x.softcap is not None:
        s.div_(x.softcap).tanh_().mul_(x.softcap)
    # On a card, to ask whether there are any would be to wait for it.
    if s.device.type != "cpu" or bool(broken.any()):
        s.masked_fill_(broken, math.nan)
    if x.bias is not None:
        s.add_(x.bias.at(queries, keys).to(s.dtype))
    return s if x.mask is None else s.masked_fill_(~pairs(x.mask, queries, keys), -math.inf)


def _broken(vectors: Float[Tensor, "b h n d"]) -> Bool[Tensor, "b h n"]:
    """Which vectors hold NaN or infinity. The largest number of each says so in one pass."""
    if not vectors.shape[-1]:
        return vectors.new_zeros(vectors.shape[:-1], dtype=torch.bool)
    largest: Tensor = torch.linalg.vector_norm(vectors.detach(), math.inf, -1)
    return ~largest.isfinite()
