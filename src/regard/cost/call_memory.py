"""Bytes that one call of attention reads, writes and holds: eager, step by step, and fused.

Eager is the code that models run when they are asked for weights: keys and values repeated for the
heads that share them, scores, scaled, plus a mask that is written out, softmax in float32, cast
back to the precision of the values, and the weighted sum. Fused is one kernel that keeps the
log-sum-exp of each row.
"""

from __future__ import annotations

from typing import NamedTuple

from regard.cost.parts import TILE, Part, pairs
from regard.inputs import AttentionInputs


class Memory(NamedTuple):
    """Bytes that are held at most beside the inputs, and kept for the backward pass."""

    peak: int
    kept: int

    def times(self, n: int) -> Memory:
        """Of n layers: one runs at a time, all are kept."""
        return Memory(self.peak, n * self.kept)


class Sizes(NamedTuple):
    """The bytes of every tensor of one call."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    repeated_k: int
    """Keys written once for each query head; 0 where none is shared."""
    repeated_v: int
    mask: int
    """The mask as numbers to add, in the precision of q; 0 without one."""
    logits: int
    """All pairs in the precision of q."""
    wide: int
    """All pairs in the precision of softmax, where that is another; else 0."""
    extra: int
    """Other tensors that are read: biases, sinks."""


def sizes(x: AttentionInputs) -> Sizes:
    B, H, Q, K = x.shape
    D, E, item = x.q.shape[-1], x.v.shape[-1], x.q.element_size()
    all_pairs = B * H * Q * K
    softmax = x.compute_dtype.itemsize
    others = [x.sink, *([] if x.bias is None else x.bias.tensors())]
    return Sizes(
        q=B * H * Q * D * item,
        k=x.k.numel() * item,
        v=x.v.numel() * item,
        out=B * H * Q * E * item,
        lse=B * H * Q * softmax,
        repeated_k=B * H * K * D * item if x.group > 1 else 0,
        repeated_v=B * H * K * E * item if x.group > 1 else 0,
        mask=0 if x.mask is None else x.mask.batch * x.mask.heads * Q * K * item,
        logits=all_pairs * item,
        wide=all_pairs * softmax if softmax != item else 0,
        extra=sum(t.numel() * t.element_size() for t in others if t is not None),
    )


def attention_parts(x: AttentionInputs, tile: tuple[int, int] = TILE) -> tuple[Part, Part]:
    """Scores (softmax included) and weighted sum."""
    s, count = sizes(x), pairs(x, tile)
    D, E = x.q.shape[-1], x.v.shape[-1]
    scores = Part(
        "scores", count.times(D), s.q + s.k + s.lse + s.extra, _eager_scores(s), True,
        again=D * count.executed,
    )  # fmt: skip
    # The last step writes the heads of a token beside each other.
    eager = s.logits + (s.repeated_v or s.v) + 3 * s.out
    return scores, Part("weighted sum", count.times(E), s.v + s.out, eager, True)


def eager_memory(x: AttentionInputs) -> Memory:
    s = sizes(x)
    # A single key head is repeated inside each product, several before both.
    single = x.k.shape[1] == 1
    before = 0 if single else s.repeated_k + s.repeated_v
    inside_k, inside_v = (s.repeated_k, s.repeated_v) if single else (0, 0)
    scoring = max(inside_k + s.logits, 2 * s.logits)
    softmax = s.logits + 2 * s.wide if s.wide else 2 * s.logits
    mixing = s.logits + max(inside_v + s.out, 2 * s.out)
    keys = s.repeated_k + s.repeated_v or s.k + s.v
    return Memory(before + s.mask + max(scoring, softmax, mixing), s.q + keys + s.logits + s.wide)


def fused_memory(x: AttentionInputs) -> Memory:
    s = sizes(x)
    return Memory(s.out + s.lse, s.q + s.k + s.v + s.out + s.lse)


def _eager_scores(s: Sizes) -> int:
    """Reads and writes, step by step."""
    repeating = s.k + s.repeated_k + s.v + s.repeated_v if s.repeated_k else 0
    product = s.q + (s.repeated_k or s.k) + s.logits
    scaling = 2 * s.logits
    masking = 2 * s.logits + s.mask if s.mask else 0
    converting = 2 * (s.logits + s.wide) if s.wide else 0
    softmax = 2 * (s.wide or s.logits)
    return repeating + product + scaling + masking + converting + softmax + s.extra
