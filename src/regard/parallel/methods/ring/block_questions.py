"""Questions that are asked of one block after the other, and how their answers are joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.calls.choice import choose
from regard.inputs import AttentionInputs
from regard.parallel.merge import merge
from regard.parallel.methods.ring.blocks import Block
from regard.traces import Trace

Answer = tuple[Tensor, ...]
Grads = Sequence[Tensor | None]
Ask = Callable[[Block, Tensor | None], Answer | None]


class BlockQuestion:
    """What is asked of each block, how answers are joined, and what a gradient of the whole is to
    the answer of one."""

    skips = True
    """Whether blocks that the mask hides say nothing."""
    about_keys = False
    """Whether the answer is about keys: it goes round with them, and is added up."""
    kept = 0
    """How many of the answers, the last ones, are for the backward pass alone."""

    def ask(self, block: Block, row: Tensor | None) -> Answer | None:
        """The answer of a block; None if it has none."""
        raise NotImplementedError

    def nothing(self, x: AttentionInputs) -> Answer:
        """The answer of no block."""
        return ()

    def of_no_query(self, x: AttentionInputs, keys: int) -> Answer:
        """What no query says about some keys."""
        raise NotImplementedError

    def joined(self, answer: Answer, found: Answer) -> Answer:
        return tuple(a + b for a, b in zip(answer, found, strict=True))

    def ended(self, x: AttentionInputs, answer: Answer) -> Answer:
        return answer

    def vjp(self, found: Sequence[Tensor], answer: Answer, grads: Grads) -> Grads:
        """Gradients of a block's answer, from those of the whole answer."""
        return grads


@dataclass(frozen=True)
class Total(BlockQuestion):
    """Answers that are added up."""

    asked: Ask
    zeros: Callable[[], Answer]
    skips: bool = True

    def ask(self, block: Block, row: Tensor | None) -> Answer | None:
        return self.asked(block, row)

    def nothing(self, x: AttentionInputs) -> Answer:
        return self.zeros()


@dataclass(frozen=True)
class Largest(Total):
    """Answers, one tensor each, of which the largest counts. Blocks that share it share the
    gradient."""

    kept = 1

    def nothing(self, x: AttentionInputs) -> Answer:
        (zeros,) = self.zeros()
        return zeros, torch.zeros_like(zeros)

    def joined(self, answer: Answer, found: Answer) -> Answer:
        (largest, ties), (each,) = answer, found
        return torch.maximum(largest, each), _ties(largest, ties, each)

    def vjp(self, found: Sequence[Tensor], answer: Answer, grads: Grads) -> Grads:
        (largest, ties), (each,), g = answer, found, grads[0]
        return [None if g is None else g * (each == largest) / ties.clamp_min(1)]


@dataclass(frozen=True)
class OfKeys(BlockQuestion):
    """An answer about keys."""

    asked: Ask
    about_keys = True

    def ask(self, block: Block, row: Tensor | None) -> Answer | None:
        return self.asked(block, row)

    def of_no_query(self, x: AttentionInputs, keys: int) -> Answer:
        B, H, _, _ = x.q.shape
        return (x.q.new_zeros(B, H, keys, dtype=x.compute_dtype),)


@dataclass(frozen=True)
class OfRows(BlockQuestion):
    """What rows see: out, lse, max_logit and entropy, merged by log-sum-exp."""

    backend: str | None
    kept = 1

    def ask(self, block: Block, row: Tensor | None) -> Answer:
        x = block.inputs
        chosen = choose(x, self.backend, statistics=True)
        trace = Trace(x, chosen.observe(x), chosen.name, chosen.questions())
        return trace.out, trace.lse, trace.max_logit, trace.entropy

    def nothing(self, x: AttentionInputs) -> Answer:
        B, H, Q, _ = x.shape
        zeros = x.q.new_zeros(B, H, Q, dtype=x.compute_dtype)
        far = torch.full_like(zeros, -math.inf)
        return zeros.new_zeros(B, H, Q, x.v.shape[3]), far, far, zeros, zeros

    def joined(self, answer: Answer, found: Answer) -> Answer:
        *before, ties = answer
        out, lse, largest, entropy = found
        # Outputs that were rounded to half precision are added up in float32.
        rows = merge(Rows(*before), Rows(out.to(before[0].dtype), lse, largest, entropy))
        return *rows, _ties(before[2], ties, largest)

    def ended(self, x: AttentionInputs, answer: Answer) -> Answer:
        out, *rest = answer
        return out.to(x.q.dtype), *(t.clone() for t in rest)

    def vjp(self, found: Sequence[Tensor], answer: Answer, grads: Grads) -> Grads:
        # With w = exp(lse of the block - lse): ∂out/∂lse of the block = w (out of the block - out),
        # ∂entropy/∂lse of the block = w (entropy of the block - log w - entropy).
        out, lse, largest, entropy = found
        all_out, all_lse, all_largest, all_entropy, ties = answer
        g_out, g_lse, g_largest, g_entropy, _ = grads
        unseen = lse == -math.inf
        log_share = torch.where(unseen, 0.0, lse - all_lse)
        share = torch.where(unseen, 0.0, log_share.exp())
        through = torch.zeros_like(share) if g_lse is None else g_lse
        given: list[Tensor | None] = [None, None, None, None]
        if g_out is not None:
            wide = g_out.to(share.dtype)
            through = through + (wide * (out.to(share.dtype) - all_out)).sum(-1)
            given[0] = (share[..., None] * wide).to(out.dtype)
        if g_entropy is not None:
            through = through + g_entropy * (entropy - log_share - all_entropy)
            given[3] = share * g_entropy
        if g_largest is not None:
            first = (largest == all_largest) & ~unseen
            given[2] = torch.where(first, g_largest / ties.clamp_min(1), 0.0)
        given[1] = share * through
        return given


def _ties(largest: Tensor, ties: Tensor, each: Tensor) -> Tensor:
    """How many blocks have the largest, once another is seen."""
    return torch.where(each > largest, torch.ones_like(ties), ties + (each == largest))
