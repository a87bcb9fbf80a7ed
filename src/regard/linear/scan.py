"""A scan over a sequence, segment by segment, with a state passed on from each to the next.

Only the states between segments are kept. The backward pass takes the segments in reverse and
computes each once more under autograd: O(n) memory, with a factor that does not depend on what a
segment needs while it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.cancellation import step as end_of_step
from regard.transforms import is_batched, may_learn, transformed

SEGMENT = 256
"""Tokens that are looked at together, where a chunk is not longer."""
Step = Callable[..., tuple[tuple[Tensor, ...], Tensor]]
"""From a state and parts of sequences to parts of the answers, and the next state. Tokens are the
last axis but one of all of them."""


def scan(
    step: Step, state: Tensor, sequences: Sequence[Tensor | None], chunk: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The answers of a whole sequence, and the state after it."""
    given = [t for t in sequences if t is not None]
    present = [t is not None for t in sequences]
    n = given[0].shape[-2]

    def filled(state: Tensor, *parts: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        found = iter(parts)
        return step(state, *(next(found) if there else None for there in present))

    size = max(chunk, SEGMENT // chunk * chunk)
    inside = (state, *given)
    if torch.compiler.is_compiling() or transformed(inside) or n <= 0:
        return filled(state, *given)
    if not may_learn(inside):
        answers, states = _along(filled, size, state, given)
        return answers, states[-1]
    *answers, last = Scanned.apply(filled, size, state, *given)  # type: ignore[no-untyped-call]
    return tuple(answers), last


def _along(
    step: Step, size: int, state: Tensor, sequences: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    n = sequences[0].shape[-2]
    states, answers = [state], None
    for start in range(0, n, size):
        end_of_step()
        part = slice(start, min(start + size, n))
        found, state = step(state, *(t[..., part, :] for t in sequences))
        if answers is None:
            answers = tuple(t.new_empty(*t.shape[:-2], n, t.shape[-1]) for t in found)
        for whole, here in zip(answers, found, strict=True):
            whole[..., part, :] = here
        states.append(state)
    return answers or (), states


class Scanned(torch.autograd.Function):
    """A scan whose backward pass makes each segment again."""

    @staticmethod
    def forward(ctx: Any, step: Step, size: int, state: Tensor, *sequences: Tensor) -> Any:
        answers, states = _along(step, size, state, sequences)
        ctx.step, ctx.size, ctx.count = step, size, len(sequences)
        ctx.save_for_backward(*sequences, *states[:-1])
        # A state that no step changed would be an input given back.
        last = states[-1].clone() if states[-1] is state else states[-1]
        return (*answers, last)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        sequences, states = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        if torch.is_grad_enabled() or any(map(is_batched, grad_outputs)):
            # A derivative that is itself differentiated, or many at once: as one segment.
            given = _step_gradients(
                ctx.step, (states[0], *sequences), wanted, grad_outputs, again=True
            )
            return None, None, *given
        return None, None, *_backwards(ctx.step, ctx.size, states, sequences, wanted, grad_outputs)


def _backwards(
    step: Step,
    size: int,
    states: Sequence[Tensor],
    sequences: Sequence[Tensor],
    wanted: Sequence[bool],
    grad_outputs: Sequence[Tensor],
) -> list[Tensor | None]:
    n = sequences[0].shape[-2]
    grads = [
        torch.zeros_like(t) if want else None for t, want in zip(sequences, wanted[1:], strict=True)
    ]
    *answers, carried = grad_outputs
    for index in reversed(range(len(states))):
        end_of_step()
        part = slice(index * size, min((index + 1) * size, n))
        inputs = [states[index], *(t[..., part, :] for t in sequences)]
        # The state learns wherever anything before it does; the first one only if it is asked to.
        learns = [index > 0 or wanted[0], *wanted[1:]]
        here = [*(t[..., part, :] for t in answers), carried]
        with torch.enable_grad():
            apart = [
                t.detach().requires_grad_(want) for t, want in zip(inputs, learns, strict=True)
            ]
            given = _step_gradients(step, apart, learns, here, again=False)
        first, *rest = given
        carried = torch.zeros_like(states[index]) if first is None else first
        for whole, found in zip(grads, rest, strict=True):
            if whole is not None and found is not None:
                whole[..., part, :] = found
    return [carried if wanted[0] else None, *grads]


def _step_gradients(
    step: Step,
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    grad_outputs: Sequence[Tensor],
    *,
    again: bool,
) -> list[Tensor | None]:
    """Gradients of the inputs of one step that want one."""
    with torch.enable_grad():
        answers, last = step(*inputs)
        learned = [
            (t, g) for t, g in zip((*answers, last), grad_outputs, strict=True) if t.requires_grad
        ]
    asked = [t for t, want in zip(inputs, wanted, strict=True) if want]
    if not learned or not asked:
        return [None for _ in inputs]
    outputs, gradients = zip(*learned, strict=True)
    found = iter(
        torch.autograd.grad(
            outputs,
            asked,
            gradients,
            allow_unused=True,
            create_graph=again and torch.is_grad_enabled(),
        )
    )
    return [next(found) if want else None for want in wanted]
