"""One pass around the ring: every rank sees each block of keys and values once, and answers its
question from each.

Gradients are those of the answer as a whole. For them keys and values go round again, each block
answers again, and the gradients of its keys and values travel with them back to their rank. So no
rank ever holds more than its own block, the one it works on, and the one that is arriving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.backends.passes import Call as Apart
from regard.backends.passes import taken_apart
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.parallel.methods.ring.block_questions import BlockQuestion
from regard.parallel.methods.ring.blocks import Blocks
from regard.parallel.methods.ring.transfer import Sums, going_round

Answer = tuple[Tensor, ...]


@dataclass(frozen=True)
class RingPass:
    """The ranks of a ring, and which blocks of keys are masked altogether."""

    blocks: Blocks
    mask: Mask | None = field(repr=False)

    def ask(self, question: BlockQuestion, x: AttentionInputs, row: Tensor | None) -> Answer:
        """The answer of all blocks. `x` are the queries, keys and values of this rank; `row`, if a
        question is about weights, the lse over all keys."""
        call, tensors = taken_apart(replace(x, sink=None))
        found: Answer = _Asked.apply(self, question, call, row, *tensors)  # type: ignore[no-untyped-call]
        return found[: len(found) - question.kept]

    def once(self, question: BlockQuestion, x: AttentionInputs, row: Tensor | None) -> Answer:
        """The same, without gradients."""
        ranks, layout = self.blocks.ranks, self.blocks.key_layout
        sums = Sums(ranks, layout) if question.about_keys else None
        answer = question.nothing(x)
        hidden = self.hidden(question)
        for owner, (k, v) in going_round(ranks, layout, [x.k, x.v]):
            found = None
            if owner not in hidden:
                found = question.ask(self.blocks.block(x, owner, k, v), row)
            if sums is not None:
                sums.add(found or question.of_no_query(x, layout.lengths[owner]))
            elif found is not None:
                answer = question.joined(answer, found)
        return question.ended(x, tuple(sums.home()) if sums is not None else answer)

    def hidden(self, question: BlockQuestion) -> frozenset[int]:
        """The ranks whose keys need not be looked at."""
        return self._hidden if question.skips else self.blocks.hidden(None)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        return self.blocks.hidden(self.mask)


class _Asked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring_pass: RingPass,
        question: BlockQuestion,
        call: Apart,
        row: Tensor | None,
        *tensors: Tensor | None,
    ) -> Answer:
        answer = ring_pass.once(question, call.inputs(*tensors), row)  # type: ignore[arg-type]
        ctx.asked = ring_pass, question, call
        ctx.split = len(answer)
        ctx.save_for_backward(*answer, row, *tensors)
        ctx.set_materialize_grads(False)
        kept = answer[len(answer) - question.kept :]
        ctx.mark_non_differentiable(*(t for t in kept if not t.is_floating_point()))
        return answer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wanted = tuple(ctx.needs_input_grad[3:])
        if all(g is None for g in grads):
            return None, None, None, *(None for _ in wanted)
        given = _AskedVjp.apply(*ctx.asked, wanted, ctx.split, *grads, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        found = iter(given)
        return None, None, None, *(next(found) if want else None for want in wanted)


class _AskedVjp(torch.autograd.Function):
    """Gradients of the row and of those tensors that want one."""

    @staticmethod
    def forward(
        ctx: Any,
        ring_pass: RingPass,
        question: BlockQuestion,
        call: Apart,
        wanted: tuple[bool, ...],
        split: int,
        *rest: Tensor | None,
    ) -> tuple[Tensor, ...]:
        grads, answer, (row, *tensors) = rest[:split], rest[split : 2 * split], rest[2 * split :]
        found = _gradients(ring_pass, question, call, wanted, grads, answer, [row, *tensors])  # type: ignore[arg-type]
        return tuple(
            g.to(t.dtype)
            for g, t in zip(found, (row, *tensors), strict=True)
            if g is not None and t is not None
        )

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RegardError(
            "ring attention is differentiable once",
            got="a derivative of a derivative",
            accepted="method='all_gather' or method='ulysses' for second derivatives",
        )


def _gradients(
    ring_pass: RingPass,
    question: BlockQuestion,
    call: Apart,
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
    answer: Answer,
    tensors: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """One more pass: the gradients of every tensor that wants one."""
    ranks, layout = ring_pass.blocks.ranks, ring_pass.blocks.key_layout
    leaves = [_leaf(t, want) for t, want in zip(tensors, wanted, strict=True)]
    totals = [_zeros(t) if want else None for t, want in zip(tensors, wanted, strict=True)]
    _, _, k, v, *_ = tensors
    assert k is not None
    assert v is not None
    learned = [i for i in (2, 3) if wanted[i]]
    sums = Sums(ranks, layout) if learned else None
    # An answer about keys has gradients that travel with them.
    carried = [g for g in grads if g is not None] if question.about_keys else []
    hidden = ring_pass.hidden(question)
    for owner, (key, value, *of_keys) in going_round(ranks, layout, [k, v, *carried]):
        leaves[2], leaves[3] = _leaf(key, wanted[2]), _leaf(value, wanted[3])
        given: list[Tensor | None] = [None] * len(leaves)
        if owner not in hidden:
            asked = of_keys if question.about_keys else grads
            given = _of_block(ring_pass, question, call, owner, leaves, answer, asked)
        for i, g in enumerate(given):
            if g is not None and i not in (2, 3):
                totals[i].add_(g)  # type: ignore[union-attr]
        if sums is not None:
            sums.add([_or_zeros(given[i], leaves[i]) for i in learned])
    for i, g in zip(learned, sums.home() if sums is not None else (), strict=True):
        totals[i] = g
    return totals


def _of_block(
    ring_pass: RingPass,
    question: BlockQuestion,
    call: Apart,
    owner: int,
    leaves: list[Tensor | None],
    answer: Answer,
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients that one block gives."""
    row, *tensors = leaves
    with torch.enable_grad():
        x = call.inputs(*tensors)  # type: ignore[arg-type]
        block = ring_pass.blocks.block(x, owner, x.k, x.v)
        found = question.ask(block, row)
    if found is None:
        return [None] * len(leaves)
    slopes = question.vjp([t.detach() for t in found], answer, grads)
    ends = [(t, g) for t, g in zip(found, slopes, strict=True) if g is not None and t.requires_grad]
    asked = [i for i, t in enumerate(leaves) if t is not None and t.requires_grad]
    given: list[Tensor | None] = [None] * len(leaves)
    if ends and asked:
        outputs, gradients = zip(*ends, strict=True)
        inputs = [leaves[i] for i in asked]
        for i, g in zip(
            asked,
            torch.autograd.grad(outputs, inputs, gradients, allow_unused=True),  # type: ignore[arg-type]
            strict=True,
        ):
            given[i] = g
    return given


def _leaf(t: Tensor | None, wanted: bool) -> Tensor | None:
    return t if t is None or not wanted else t.detach().requires_grad_()


def _zeros(t: Tensor | None) -> Tensor | None:
    """Where gradients are added up: those of half precision in float32."""
    return None if t is None else torch.zeros_like(t, dtype=_wide(t.dtype))


def _or_zeros(g: Tensor | None, t: Tensor | None) -> Tensor:
    assert t is not None
    return torch.zeros_like(t, dtype=_wide(t.dtype)) if g is None else g.to(_wide(g.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
