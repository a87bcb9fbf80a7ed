"""The passes as one function of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.backends.triton.linear.function import plainly
from regard.backends.triton.recurrent.chunk import Fading
from regard.backends.triton.recurrent.passes import Given, Kept, backward, forward
from regard.transforms import is_batched

Plain = Callable[..., tuple[Tensor, Tensor]]
"""The same in PyTorch's operations: from the parts of `Given` to output and the next state."""


class Recurrent(torch.autograd.Function):
    """Output, and the state at the end. A derivative that is itself differentiated, and many at
    once, are left to PyTorch's operations."""

    @staticmethod
    def forward(ctx: Any, plain: Plain, scale: float, *given: Tensor | None) -> Any:
        out, last, kept = forward(Given(*given), scale)  # type: ignore[arg-type]
        ctx.plain, ctx.scale = plain, scale
        whole, part = (None, None) if kept.fading is None else kept.fading
        written = None if kept.written is given[2] else kept.written
        ctx.save_for_backward(*given, whole, part, kept.solved, kept.turns, kept.states, written)
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        given, (whole, part, solved, turns, states, written) = (
            ctx.saved_tensors[:6], ctx.saved_tensors[6:],
        )  # fmt: skip
        wanted = ctx.needs_input_grad[2:]
        if all(g is None for g in grad_outputs):
            return None, None, *(None for _ in wanted)
        if torch.is_grad_enabled() or any(map(is_batched, grad_outputs)):
            return None, None, *plainly(ctx.plain, given, wanted, grad_outputs)
        g, g_last = grad_outputs
        call = Given(*given)
        if g is None:
            g = call.v.new_zeros(*call.q.shape[:3], call.v.shape[3])
        fading = None if whole is None else Fading(whole, part)
        kept = Kept(fading, solved, turns, states, call.v if written is None else written)
        found = backward(call, ctx.scale, kept, g, g_last)
        return None, None, *(t if want else None for t, want in zip(found, wanted, strict=True))
