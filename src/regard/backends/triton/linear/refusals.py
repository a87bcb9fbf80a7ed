"""Which calls the kernels of linear attention cannot run, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.triton.refusals import INSTALLED, MOST, WIDEST, runs_on

SHORT = 64
"""Tokens below which PyTorch's operations are as quick."""


def why_not(q: Tensor, k: Tensor, v: Tensor, *, both_ways: bool) -> list[str]:
    """Every reason why the kernels cannot run a call; q [B, H, Q, M] and k are features, or what
    these are made of. `both_ways` says that documents are read without an order."""
    if not INSTALLED:
        return ["triton is not installed"]
    reasons = runs_on(q.device)
    if torch.float64 in (q.dtype, v.dtype):
        reasons.append("its kernels compute in float32")
    if both_ways:
        reasons.append("within documents its sums run in one direction, from the first token on")
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        reasons.append(f"its tiles hold features and values up to {WIDEST} wide")
    if q.shape[0] * q.shape[1] > MOST:
        reasons.append(f"it has programs for {MOST:,} heads of all sequences at most")
    if 0 in (*q.shape, *k.shape, *v.shape):
        reasons.append("it has no kernel for empty tensors")
    return reasons
