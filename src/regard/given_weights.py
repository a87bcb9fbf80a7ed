"""Weights that somebody has at hand, as a trace: the same questions, the same views."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard import biases, masks
from regard.errors import RegardError
from regard.traces import Trace

ROUNDED = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a row of many narrow numbers may be from 1 in all."""


def trace_of_weights(weights: Float[Tensor, "*bh q k"]) -> Trace:
    """A trace whose weights are these: queries and keys that say nothing, and the logarithms of the
    weights as what is added to their logits."""
    _check(weights)
    own = weights.detach()
    wide = own if own.dtype == torch.float64 else own.float()
    Q, K = wide.shape[-2:]
    q, k = (wide.new_zeros(*wide.shape[:-2], n, 1) for n in (Q, K))
    seen = wide > 0
    logits = torch.where(seen, wide, 1.0).log()
    # exp(logit - 0): the weights as they are, also where narrow ones do not add up to 1 exactly.
    lse = torch.where(seen.any(-1), 0.0, -torch.inf).to(wide)
    return Trace.of(
        q, k, lse, mask=masks.keep(seen), bias=biases.dense(logits), scale=1.0, verify=False
    )


def _check(weights: Any) -> None:
    accepted = "a tensor [queries, keys], [batch, queries, keys] or [batch, heads, queries, keys]"
    if not isinstance(weights, Tensor):
        raise RegardError("weights are a tensor", got=type(weights).__name__, accepted=accepted)
    if not weights.is_floating_point() or not 2 <= weights.ndim <= 4 or not weights.numel():
        raise RegardError(
            "these are no weights of attention",
            got=f"{weights.dtype} {list(weights.shape)}",
            accepted=accepted,
        )
    total = weights.detach().double().sum(-1)
    near = ROUNDED.get(weights.dtype, 1e-3)
    # A row that sees nothing has no weights.
    wrong = ~(((total - 1).abs() <= near) | (total == 0)) | (weights.detach() < 0).any(-1)
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise RegardError(
            "weights are 0 or more, and those of a row add up to 1",
            got=f"{int(wrong.sum())} rows that do not; the first, {first}, adds up to "
            f"{float(total[tuple(first)]):.4g}",
            accepted="what softmax gave, before dropout; rows of zeros see nothing",
            do="give weights.softmax(-1) for logits, or weights / weights.sum(-1, keepdim=True)",
        )
