"""Which calls the kernels cannot run, and why."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from regard.biases.alibi import Alibi
from regard.biases.dense import Dense
from regard.biases.pairwise import BoundPairwise
from regard.biases.relative import Relative
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.transforms import may_learn
from regard.values import Shape

INSTALLED = find_spec("triton") is not None
"""Asked once: the compiler, which asks with every graph, does not know how."""
WIDEST = 256
MOST = 65_535
"""The most programs along the axis of a grid that counts heads: CUDA's own limit."""
FARTHEST = 2**24
"""Tokens up to which float32 counts distances exactly."""
NARROW = 16
"""Columns of the narrowest tiles."""
_FAULT = f"its assembler, ptxas before 12.9, spoils kernels for values narrower than {NARROW}"
_WRONG_DEVICE = "its kernels run on CUDA; elsewhere only interpreted, with TRITON_INTERPRET=1"


def why_not(x: AttentionInputs) -> list[str]:
    """Every reason why the kernels cannot run a call."""
    if not INSTALLED:
        return ["triton is not installed"]
    reasons = runs_on(x.q.device)
    if x.q.dtype == torch.float64:
        reasons.append("its kernels compute in float32")
    if not isinstance(x.comparison, Dot):
        reasons.append("it compares by dot products only")
    if isinstance(x.bias, BoundPairwise):
        reasons.append("it has no kernel for a bias made of a function")
    elif x.bias is not None and not isinstance(x.bias, (Alibi, Dense, Relative)):
        reasons.append("it has no kernel for such a bias")
    if isinstance(x.bias, Alibi) and max(x.shape.Q, x.shape.K) > FARTHEST:
        reasons.append(f"it counts distances of a bias up to {FARTHEST:,} tokens")
    if max(x.q.shape[-1], x.v.shape[-1]) > WIDEST:
        reasons.append(f"its tiles hold heads up to {WIDEST} wide")
    # A compiled graph holds for any batch size: the kernels themselves refuse a larger one.
    if not torch.compiler.is_compiling() and x.shape.B * x.shape.H > MOST:
        reasons.append(f"it has programs for {MOST:,} heads of all sequences at most")
    if 0 in (*x.shape, x.q.shape[-1], x.v.shape[-1]):
        reasons.append("it has no kernel for empty tensors")
    if x.v.shape[-1] < NARROW and _is_half(x) and _assembled_wrongly(x.q.device):
        reasons.append(f"{_FAULT}; Triton 3.6 or later has one that does not")
    if torch.are_deterministic_algorithms_enabled() and (learned := _added_by_many(x)):
        reasons.append(f"its gradient of {learned} is added up by atomics, in no fixed order")
    return reasons


def runs_on(device: torch.device) -> list[str]:
    """Why kernels do not run on a device."""
    runs = device.type == "cuda" or (device.type == "cpu" and _interpreted())
    return [] if runs else [_WRONG_DEVICE]


def is_shared(bias: Dense, shape: Shape) -> bool:
    """Whether several pairs share one element of a dense bias."""
    return any(have < need for have, need in zip(bias.tensor.shape, shape, strict=True))


def _added_by_many(x: AttentionInputs) -> str | None:
    """What the call learns to whose gradient several programs add, by atomics."""
    if x.bias is None or not may_learn(x.bias.tensors()):
        return None
    if isinstance(x.bias, Relative):
        return "a relative table"
    if isinstance(x.bias, Dense) and is_shared(x.bias, x.shape):
        return "a shared dense bias"
    return None


def _is_half(x: AttentionInputs) -> bool:
    return x.q.dtype in (torch.bfloat16, torch.float16)


def _assembled_wrongly(device: torch.device) -> bool:
    """Whether kernels with products in half precision may be spoilt there."""
    if not runs_on(device) or device.type == "meta":
        # Here, because they import Triton.
        from regard.backends.triton.arguments import generation
        from regard.backends.triton.launches.assembler import is_faulty

        return generation(device) == 9 and is_faulty()
    return False


# As `torch.compiler.assume_constant_result` does, which imports the compiler.
_assembled_wrongly._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
