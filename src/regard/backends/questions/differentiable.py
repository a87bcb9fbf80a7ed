"""Questions about the weights as functions that autograd and the transforms of PyTorch know.

An answer comes from a second pass, whichever backend it is of. Its gradient is that of the tiled
formulas, which need the inputs and lse alone; it has no derivative of its own, nor a forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.backends.functions import one_by_one
from regard.backends.passes import Call, no_autocast, taken_apart
from regard.backends.tiled.second_pass import Learned, QuestionGradients
from regard.backends.vmap_entries import Lot, each, lots
from regard.between_graphs import between_graphs
from regard.errors import RegardError
from regard.inputs import AttentionInputs, in_memory
from regard.transforms import may_learn, transformed

__all__ = ["GRADIENTS", "Learned", "Question", "answer"]

GRADIENTS = QuestionGradients()
Ask = Callable[[AttentionInputs, Tensor], tuple[Tensor, ...]]
UNCOMPILED = (
    "received(), map() and mean_logit of a trace that learns cannot be part of a compiled graph: "
    "compile the function without fullgraph=True"
)


@runtime_checkable
class Vjp(Protocol):
    """The gradients of a question's inputs and row, from that of its answer."""

    def __call__(self, x: AttentionInputs, row: Tensor, g: Tensor, /, *, bias: bool) -> Learned: ...


class Question(NamedTuple):
    """A question: how it is written, answered, and differentiated if it is."""

    name: str
    ask: Ask
    """From the inputs and one number per row, mostly the lse."""
    vjp: Vjp | None = None
    compiled: Callable[[AttentionInputs, Tensor], Tensor] | None = None
    """The answer with its gradient inside a graph that is compiled, where there can be one."""


def answer(question: Question, x: AttentionInputs, row: Tensor) -> tuple[Tensor, ...]:
    """The answer, in the graph of autograd where it has a gradient."""
    inside = (*x.tensors(), row)
    learns = question.vjp is not None and may_learn(inside)
    changed = transformed(inside)
    if not (learns or changed):
        return question.ask(x, row.detach())
    if question.compiled is not None and torch.compiler.is_compiling() and not changed:
        return (question.compiled(x, row),)
    return _in_graph(question, x, row)


@between_graphs(UNCOMPILED)
def _in_graph(question: Question, x: AttentionInputs, row: Tensor) -> tuple[Tensor, ...]:
    call, tensors = taken_apart(x)
    return Asked.apply(question, call, row, *tensors)  # type: ignore[no-any-return,no-untyped-call]


class Asked(torch.autograd.Function):
    """A question, and its gradient; it says so where there is none."""

    @staticmethod
    def forward(
        question: Question, call: Call, row: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        found = question.ask(call.inputs(*tensors), row)  # type: ignore[arg-type]
        # An answer that needed no computation is copied: autograd would mistake it for the input.
        return tuple(t.clone() if t is row else t for t in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        question, call, row, *tensors = inputs
        ctx.asked = question, call
        ctx.save_for_backward(row, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in output if not t.is_floating_point()))

    @staticmethod
    @between_graphs(UNCOMPILED)
    def backward(ctx: Any, g: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        question, call = ctx.asked
        # An answer that travelled with others, of which only these are learned from.
        if g is None and all(other is None for other in others):
            return tuple(None for _ in ctx.needs_input_grad)
        if question.vjp is None:
            _refuse(question.name)
        row, *tensors = ctx.saved_tensors
        wanted = tuple(
            want and gives
            for want, gives in zip(
                ctx.needs_input_grad[2:], _gives(call, row, tensors), strict=True
            )
        )
        if not any(wanted):
            return None, None, *(None for _ in wanted)
        given = iter(AskedVjp.apply(question, call, wanted, g, row, *tensors))  # type: ignore[no-untyped-call]
        return None, None, *(next(given) if want else None for want in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        question, _ = ctx.asked
        _refuse(question.name, "" if question.vjp is None else " in forward mode")

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *operands: Any) -> Any:
        question, call, row, *tensors = operands
        found = lots(call, tensors, axes[3:], info.batch_size)

        def given(lot: Lot) -> list[Tensor]:
            answered = Asked.apply(question, lot.call, lot.rows(row, axes[2]), *lot.tensors)  # type: ignore[no-untyped-call]
            return [*map(lot.restored, answered)]

        return each(found, given)


class AskedVjp(torch.autograd.Function):
    """Gradients of the row and of those tensors that want one and get one."""

    @staticmethod
    def forward(
        question: Question,
        call: Call,
        wanted: tuple[bool, ...],
        g: Tensor,
        row: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x = call.inputs(*tensors)  # type: ignore[arg-type]
        biases = 0 if x.bias is None else len(x.bias.tensors())
        learns_bias = any(wanted[len(wanted) - biases :])
        assert question.vjp is not None

        def vjp(g: Tensor) -> list[Tensor]:
            assert question.vjp is not None
            with no_autocast(x.q):
                lse, given = question.vjp(x, row, in_memory(g), bias=learns_bias)
            # A row that is no lse gives nothing on: what it is a number of does.
            lse = torch.zeros_like(row) if lse is None else lse
            every = [lse, given.q, given.k, None, None, None, *given.own(x)]
            return [
                found.to(t.dtype)
                for want, found, t in zip(wanted, every, (row, *tensors), strict=True)
                if want and found is not None and t is not None
            ]

        return tuple(one_by_one(vjp, [g], sum(wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        _refuse_second(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        _refuse_second(ctx.name)

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *operands: Any) -> Any:
        question, call, wanted, g, row, *tensors = operands
        # What is shared by a batch has one gradient for all of it, but entries have one each.
        alone = any(wanted[4:])
        found = lots(call, tensors, axes[5:], info.batch_size, alone=alone)

        def given(lot: Lot) -> list[Tensor]:
            rows = lot.rows(g, axes[3]), lot.rows(row, axes[4])
            given = AskedVjp.apply(question, lot.call, wanted, *rows, *lot.tensors)  # type: ignore[no-untyped-call]
            return [*map(lot.restored, given)]

        return each(found, given)


def _gives(call: Call, row: Tensor, tensors: Sequence[Tensor | None]) -> list[bool]:
    """Which of row and tensors an answer may give a gradient: not values, sink and seed, of which
    an answer knows through the lse alone, nor masks."""
    x = call.inputs(*tensors)  # type: ignore[arg-type]
    masks = 0 if x.mask is None else len(x.mask.tensors())
    biases = [] if x.bias is None else x.bias.tensors()
    return [
        row.is_floating_point(), True, True, False, False, False,
        *(True for _ in x.comparison.tensors()),
        *(False for _ in range(masks)),
        *(t.is_floating_point() for t in biases),
    ]  # fmt: skip


def _refuse(name: str, how: str = "") -> None:
    """Say what of a trace has a derivative."""
    accepted = "derivatives of out, lse, entropy, weights() and mass()"
    if not how:
        accepted += ", and gradients of max_logit, mean_logit, received() and map()"
    raise RegardError(
        f"{name} has no derivative{how}",
        got="a transform that differentiates by what it depends on",
        accepted=accepted,
        do=f"trace.detach().{name} for its numbers alone",
    )


def _refuse_second(name: str) -> None:
    raise RegardError(
        f"{name} is differentiable once",
        got="a derivative of a derivative",
        accepted="second derivatives of out, lse, entropy, weights() and mass(), by "
        'backend="reference"',
    )
