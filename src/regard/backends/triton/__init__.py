"""Fused kernels written in Triton that report what they saw."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Repeated, Rows, SecondPass, Work
from regard.biases.dense import Dense
from regard.biases.pairwise import BoundPairwise
from regard.biases.relative import Relative
from regard.cost.counting import visited_pairs
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.transforms import may_learn, under_torch_func
from regard.values import Shape

__all__ = ["Triton", "outruns_cudnn", "why_not"]

INSTALLED = find_spec("triton") is not None
"""Asked once: the compiler, which asks with every graph, does not know how."""
WIDEST = 256
MOST = 65_535
"""Programs along the axis of a grid that counts heads: CUDA has no more."""
_WRONG_DEVICE = "its kernels run on CUDA; elsewhere only interpreted, with TRITON_INTERPRET=1"


class Triton:
    name = "triton"
    observes = True

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        return why_not(inputs)

    def reserved(self, inputs: AttentionInputs) -> str:
        return "" if inputs.q.device.type == "cuda" else "on CPU: it is interpreted"

    def attend(self, inputs: AttentionInputs) -> Float[Tensor, "b h q e"]:
        from regard.backends.triton.operators import run

        return run(inputs, statistics=False).out

    def observe(self, inputs: AttentionInputs) -> Rows:
        from regard.backends.triton.operators import run

        return run(inputs, statistics=True)

    def repeated(self, inputs: AttentionInputs, *, statistics: bool) -> Repeated:
        from regard.backends.triton.operators import repeated

        return repeated(inputs, statistics=statistics)

    def questions(self) -> SecondPass:
        from regard.backends.triton.second_pass import TritonPass

        return TritonPass()

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        if not INSTALLED:
            raise RegardError("triton is not installed", do="pip install triton")
        from regard.backends.triton.tuning import forward_settings

        how = forward_settings(inputs, statistics=statistics)
        B, H, Q, _ = inputs.shape
        # Two numbers per row for the backward pass, and the sums of every split.
        split = how.splits * (inputs.v.shape[-1] + 3) if how.splits > 1 else 0
        loop = "cuDNN's, mended where a NaN is hidden" if how.cudnn else ""
        return Work(visited_pairs(inputs, how.rows, how.keys), B * H * Q * (2 + split) * 4, loop)


def why_not(x: AttentionInputs) -> list[str]:
    """Every reason why the kernels cannot run a call."""
    if not INSTALLED:
        return ["triton is not installed"]
    reasons = []
    if x.q.device.type != "cuda" and not (x.q.device.type == "cpu" and _interpreted()):
        reasons.append(_WRONG_DEVICE)
    if x.q.dtype == torch.float64:
        reasons.append("its kernels compute in float32")
    if not isinstance(x.comparison, Dot):
        reasons.append("it compares by dot products only")
    if isinstance(x.bias, BoundPairwise):
        reasons.append("it has no kernel for a bias made of a function")
    if max(x.q.shape[-1], x.v.shape[-1]) > WIDEST:
        reasons.append(f"its tiles hold heads up to {WIDEST} wide")
    # A graph is not bound to batches of fewer: the kernels themselves refuse more.
    if not torch.compiler.is_compiling() and x.shape.B * x.shape.H > MOST:
        reasons.append(f"it has programs for {MOST:,} heads of all sequences at most")
    if 0 in (*x.shape, x.q.shape[-1], x.v.shape[-1]):
        reasons.append("it has no kernel for empty tensors")
    if torch.are_deterministic_algorithms_enabled() and (learned := _added_by_many(x)):
        reasons.append(f"its gradient of {learned} is added up by atomics, in no fixed order")
    return reasons


def outruns_cudnn(x: AttentionInputs) -> bool:
    """Whether the output of a call that the kernels can run comes sooner from them, and gradients
    no later. While a call is compiled or transformed, cards and addresses cannot be asked."""
    if torch.compiler.is_compiling() or under_torch_func():
        return False
    from regard.backends.triton import cudnn, tuning

    learned = torch.is_grad_enabled() and any(t.requires_grad for t in (x.q, x.k, x.v))
    return tuning.outruns_cudnn(x) and (cudnn.pulls_output(x) or not learned)


def is_shared(bias: Dense, shape: Shape) -> bool:
    """Whether several pairs have one number of a dense bias."""
    return any(have < need for have, need in zip(bias.tensor.shape, shape, strict=True))


def _added_by_many(x: AttentionInputs) -> str | None:
    """What the call learns that many programs add to."""
    if x.bias is None or not may_learn(x.bias.tensors()):
        return None
    if isinstance(x.bias, Relative):
        return "a relative table"
    if isinstance(x.bias, Dense) and is_shared(x.bias, x.shape):
        return "a shared dense bias"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
