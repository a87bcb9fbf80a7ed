"""Calls whose logits are too large to compute weights in float32, and what is done instead.

A product of float32 numbers that add up to size s is rounded by about s · 2^-24, and by another
rounding in a product of matrices of another shape. A weight is exp of a logit: where s is in the
thousands, two questions about one pair would no longer get one answer, and exp(logit - lse) could
be more than 1. Such calls are asked in float64, with a log-sum-exp of the same numbers.

The output and the row statistics stay what the forward pass made of float32 logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot, DotInOrder

SURE = 2.0**-13
"""The largest relative error of a weight before it is computed in float64. In float32 that is a
logit of 1024; logits of healthy models are below a hundred."""


def widened(x: AttentionInputs, lse: Float[Tensor, "b h q"]) -> AttentionInputs | None:
    """The call in float64, without values, if rounding could change its weights noticeably."""
    if _undecidable(x.q):
        return None
    size = x.largest_sum
    if x.bias is not None or x.sink is not None:
        # They are part of the lse. A pair that matters has a logit about as large.
        size += float(lse.detach().abs().nan_to_num_(0.0, 0.0, 0.0).amax()) if lse.numel() else 0.0
    double = x.q.dtype == torch.float64
    if _rounding(torch.float64 if double else torch.float32) * size <= SURE:
        return None
    how = x.comparison
    if isinstance(how, Dot) and _rounding(torch.float64) * x.largest_sum > SURE:
        how = DotInOrder(how.scale)
    q, k, v = (t.to(torch.float64) for t in (x.q, x.k, x.v[..., :0]))
    return replace(x, q=q, k=k, v=v, comparison=how, dropout=0.0, seed=None)


def taken_as_told(x: AttentionInputs) -> tuple[AttentionInputs, Bool[Tensor, ""]] | None:
    """The call as if float32 were exact enough; and whether it is, as a tensor on the device, so
    that calls need not wait for it. Where it is not, the answers do not count. None for calls whose
    logits are more than products."""
    if not isinstance(x.comparison, Dot) or x.bias is not None or x.sink is not None:
        return None
    squared = _longest_squared(x.q) * _longest_squared(x.k) * x.comparison.scale**2
    told = replace(x)
    vars(told)["largest_sum"] = 0.0
    return told, squared <= (SURE / _rounding(torch.float32)) ** 2


def _longest_squared(vectors: Float[Tensor, "b h n d"]) -> Float[Tensor, ""]:
    """Roughly. What overflows or is no number is not below anything."""
    if vectors.dtype == torch.bfloat16:
        # As a product: a sum over so few numbers takes a card three times as long.
        squared = (vectors * vectors) @ vectors.new_ones(vectors.shape[-1])
    else:
        wide = torch.promote_types(vectors.dtype, torch.float32)
        squared = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).square()
    return squared.amax()


def as_found(
    exact: Float[Tensor, "b h *q"], lse: Float[Tensor, "b h *q"]
) -> Float[Tensor, "b h *q"]:
    """Numbers in float64 for rows whose lse is finite. What the forward pass found broken (or
    nothing in) stays so, also where float64 would not have overflowed."""
    return torch.where(lse.isfinite(), exact, lse.to(exact.dtype))


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _undecidable(t: Tensor) -> bool:
    """Whether the size of numbers is unknown: while a call is compiled, transformed or captured in
    a CUDA graph there are none yet."""
    return (
        t.is_meta
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or (t.is_cuda and torch.cuda.is_current_stream_capturing())
    )
