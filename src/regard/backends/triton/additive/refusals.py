"""Which calls the kernels of additive attention cannot run, and why."""

from __future__ import annotations

import torch

from regard.backends.triton.refusals import INSTALLED, MOST, WIDEST, runs_on
from regard.biases.alibi import Alibi
from regard.biases.dense import Dense
from regard.biases.relative import Relative
from regard.inputs import AttentionInputs
from regard.transforms import may_learn


def why_not(x: AttentionInputs) -> list[str]:
    """Every reason why the kernels cannot run a call."""
    if not INSTALLED:
        return ["triton is not installed"]
    reasons = runs_on(x.q.device)
    if x.q.dtype == torch.float64:
        reasons.append("its kernels compute in float32")
    if x.bias is not None:
        if not isinstance(x.bias, (Alibi, Dense, Relative)):
            reasons.append("it has no kernel for such a bias")
        elif may_learn(x.bias.tensors()):
            reasons.append("it has no kernel for gradients of a bias beside additive scores")
    if max(x.q.shape[-1], x.v.shape[-1]) > WIDEST:
        reasons.append(f"its tiles hold units and values up to {WIDEST} wide")
    # A compiled graph holds for any batch size: the kernels themselves refuse a larger one.
    if not torch.compiler.is_compiling() and x.shape.B * x.shape.H > MOST:
        reasons.append(f"it has programs for {MOST:,} heads of all sequences at most")
    if 0 in (*x.shape, x.q.shape[-1], x.v.shape[-1]):
        reasons.append("it has no kernel for empty tensors")
    return reasons
