"""The questions that a trace asks its second pass, each with the gradient of its answer, if any."""

from __future__ import annotations

from torch import Tensor

from regard.backends.contract import Pool, SecondPass
from regard.backends.questions.differentiable import GRADIENTS, Learned, Question
from regard.backends.questions.largest_logit import largest_logit
from regard.inputs import AttentionInputs


def max_logit() -> Question:
    """The largest logits: they are known already, and only their gradient is computed."""

    def vjp(x: AttentionInputs, _: Tensor, g: Tensor, *, bias: bool) -> Learned:
        return GRADIENTS.max_logit(x, g, bias=bias)

    return Question("max_logit", lambda _, row: (row,), vjp, largest_logit)


def mean_logit(second_pass: SecondPass) -> Question:
    def vjp(x: AttentionInputs, _: Tensor, g: Tensor, *, bias: bool) -> Learned:
        return GRADIENTS.mean_logit(x, g, bias=bias)

    return Question("mean_logit", lambda x, _: (second_pass.mean_logit(x),), vjp)


def logit_spread(second_pass: SecondPass, name: str) -> Question:
    """Variances and least logits, for a property of that name."""
    return Question(name, lambda x, _: tuple(second_pass.logit_spread(x)))


def received(second_pass: SecondPass) -> Question:
    def vjp(x: AttentionInputs, lse: Tensor, g: Tensor, *, bias: bool) -> Learned:
        return GRADIENTS.received(x, lse, g, bias=bias)

    return Question("received()", lambda *of: (second_pass.received(*of),), vjp)


def top(second_pass: SecondPass, n: int) -> Question:
    return Question(f"top({n})", lambda x, lse: second_pass.top(x, lse, n))


def pooled(
    second_pass: SecondPass,
    size: tuple[int, int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    pool: Pool,
) -> Question:
    """The weights of a region of queries and keys, pooled into cells."""

    def ask(x: AttentionInputs, lse: Tensor) -> tuple[Tensor]:
        return (second_pass.pooled(x, lse, size, rows, columns, pool),)

    def vjp(x: AttentionInputs, lse: Tensor, g: Tensor, *, bias: bool) -> Learned:
        return GRADIENTS.pooled(x, lse, g, rows, columns, pool, bias=bias)

    return Question("map()", ask, vjp)
