"""The passes as one function of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.backends.triton.linear.passes import Call, Found, backward, forward
from regard.transforms import is_batched

Plain = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The same in PyTorch's operations: from q, k, v and a state to output, sums and the next state."""


class Fused(torch.autograd.Function):
    """Output, sums of weights, and the state at the end. A derivative that is itself
    differentiated, and many at once, are left to PyTorch's operations."""

    @staticmethod
    def forward(
        ctx: Any, plain: Plain, call: Call, q: Tensor, k: Tensor, v: Tensor, start: Tensor
    ) -> Any:
        found = forward(call, q, k, v, start)
        ctx.plain, ctx.call = plain, call
        ctx.save_for_backward(q, k, v, start, *found)
        ctx.set_materialize_grads(False)
        return found.out, found.total, found.last

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        q, k, v, start, *rest = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        if all(g is None for g in grad_outputs):
            return None, None, *(None for _ in wanted)
        if torch.is_grad_enabled() or any(map(is_batched, grad_outputs)):
            return None, None, *plainly(ctx.plain, (q, k, v, start), wanted, grad_outputs)
        g, g_total, g_last = grad_outputs
        found = Found(*rest)
        g = torch.zeros_like(found.out) if g is None else g
        given = backward(ctx.call, q, k, v, found, g, g_total, g_last)
        return None, None, *(t if want else None for t, want in zip(given, wanted, strict=True))


def plainly(
    plain: Callable[..., tuple[Tensor, ...]],
    inputs: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
    grad_outputs: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Gradients of the inputs that want one, by PyTorch's operations."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        if not again:
            inputs = tuple(
                None if t is None else t.detach().requires_grad_(want)
                for t, want in zip(inputs, wanted, strict=True)
            )
        answers = plain(*inputs)
    learned = [(a, g) for a, g in zip(answers, grad_outputs, strict=True) if g is not None]
    asked = [t for t, want in zip(inputs, wanted, strict=True) if t is not None and want]
    outputs, gradients = zip(*learned, strict=True)
    found = iter(
        torch.autograd.grad(outputs, asked, gradients, allow_unused=True, create_graph=again)
    )
    return [next(found) if want else None for want in wanted]
