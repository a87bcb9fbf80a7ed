"""Fused kernels written in Triton that give row statistics beside the output."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Repeated, Rows, SecondPass, Work, run_again
from regard.backends.triton.additive.refusals import why_not as why_not_additive
from regard.backends.triton.refusals import INSTALLED, why_not
from regard.cost.call_counts import visited_pairs
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot, TanhSum
from regard.transforms import RECORDED, recorded, under_torch_func

__all__ = ["INSTALLED", "Triton", "outruns_cudnn", "why_not"]


class Triton:
    name = "triton"
    observes = True

    def refuses(self, inputs: AttentionInputs, *, statistics: bool) -> list[str]:
        if recorded():
            return [RECORDED]
        if isinstance(inputs.comparison, TanhSum):
            return why_not_additive(inputs)
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
        if not isinstance(inputs.comparison, Dot):
            return run_again(self, inputs, statistics=statistics)
        from regard.backends.triton.operators import repeated

        return repeated(inputs, statistics=statistics)

    def questions(self) -> SecondPass:
        from regard.backends.triton.questions.second_pass import TritonPass

        return TritonPass()

    def work(self, inputs: AttentionInputs, *, statistics: bool) -> Work:
        if not INSTALLED:
            raise RegardError("triton is not installed", do="pip install triton")
        if isinstance(inputs.comparison, TanhSum):
            return _additive_work(inputs)
        from regard.backends.triton.replay import training
        from regard.backends.triton.settings.tuning import forward_settings, trained_by_cudnn

        how = forward_settings(inputs, statistics=statistics)
        learns = training.AVAILABLE and inputs.needs_grad and not statistics
        trained = learns and trained_by_cudnn(inputs)
        B, H, Q, _ = inputs.shape
        # Two numbers per row for the backward pass, and the sums of every split.
        split = how.splits * (inputs.v.shape[-1] + 3) if how.splits > 1 else 0
        loop = "cuDNN's, corrected where a NaN is masked" if how.cudnn or trained else ""
        return Work(visited_pairs(inputs, how.rows, how.keys), B * H * Q * (2 + split) * 4, loop)


def _additive_work(x: AttentionInputs) -> Work:
    from regard.backends.triton.additive.passes import tiles_for

    tile = tiles_for(x).forward
    B, H, Q, K = x.shape
    # Queries and keys turned, and two numbers per row for the backward pass.
    held = (B * H * Q + B * x.k.shape[1] * K) * x.q.shape[-1] + 2 * B * H * Q
    return Work(visited_pairs(x, tile.rows, tile.keys), held * 4)


def outruns_cudnn(x: AttentionInputs) -> bool:
    """Whether the kernels give the output of a call that they can run sooner than cuDNN, and its
    gradients no later. While a call is compiled or transformed, GPUs and addresses are unknown."""
    if torch.compiler.is_compiling() or under_torch_func() or not isinstance(x.comparison, Dot):
        return False
    from regard.backends.triton import cudnn
    from regard.backends.triton.settings import tuning

    learned = torch.is_grad_enabled() and any(t.requires_grad for t in (x.q, x.k, x.v))
    return tuning.outruns_cudnn(x) and (cudnn.runs_output_backward(x) or not learned)
