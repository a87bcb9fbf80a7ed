"""Jagged nested tensors: sequences of different lengths, packed end to end into one call.

Nothing is padded: the packed call has as many queries and keys as there are tokens, under a mask
that keeps sequences apart and counts places from the start of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.between_graphs import between_graphs
from regard.biases.bias import Bias
from regard.biases.dense import Dense
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.packed import Packed


class Ragged(NamedTuple):
    """Sequences end to end [n, H, D], and where each starts and ends."""

    values: Tensor
    offsets: Tensor
    heads: bool

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def of(self, answer: Tensor) -> Tensor:
        """An answer [1, H, n, ...] as sequences: [B, H, j, ...], or [B, j, ...] without heads."""
        ordered = answer[0].transpose(0, 1) if self.heads else answer[0, 0]
        nested: Tensor = torch.nested.nested_tensor_from_jagged(ordered, offsets=self.offsets)
        return nested.transpose(1, 2) if self.heads else nested


@dataclass(frozen=True)
class JaggedInputs:
    """One call for all sequences."""

    queries: Ragged
    keys: Ragged
    v: Tensor
    mask: Packed

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.queries.values, self.keys.values
        return _packed(q), _packed(k), _packed(self.v)


def any_nested(*tensors: Any) -> bool:
    """Whether one of them is a nested tensor of any layout."""
    return any(isinstance(t, Tensor) and t.is_nested for t in tensors)


@between_graphs(
    "regard reads the lengths of nested tensors, which a graph does not know: compile without "
    "fullgraph=True, or pack the sequences into one and use masks.documents(ids)"
)
def pack(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Bias | None) -> JaggedInputs:
    """Sequences as one call; refused where they do not fit each other."""
    _check_layouts(q, k, v)
    queries, keys, values = (_ragged(t) for t in (q, k, v))
    sizes = [len(t.lengths) for t in (queries, keys, values)]
    if len(set(sizes)) > 1:
        raise RegardError(
            "q, k and v have different batch sizes",
            got=f"q {sizes[0]}, k {sizes[1]}, v {sizes[2]} sequences",
            accepted="one batch size",
        )
    if not torch.equal(keys.lengths, values.lengths):
        raise RegardError(
            "each key needs its value",
            got=f"lengths: k {keys.lengths.tolist()}, v {values.lengths.tolist()}",
            accepted="k and v with the same lengths",
        )
    lengths = queries.lengths, keys.lengths
    _check_bias(bias, *lengths)
    return JaggedInputs(queries, keys, values.values, Packed(mask, *(n.cpu() for n in lengths)))


def _packed(values: Tensor) -> Tensor:
    return values.transpose(0, 1)[None]


def _check_layouts(*tensors: Tensor) -> None:
    kinds = []
    for name, t in zip("qkv", tensors, strict=True):
        if isinstance(t, Tensor) and t.is_nested and t.layout == torch.strided:
            raise RegardError(
                f"{name} is a nested tensor in the strided layout, which has few operators",
                accepted="nested tensors in the jagged layout",
                do="make it with layout=torch.jagged",
            )
        kinds.append(f"{name} {'nested' if isinstance(t, Tensor) and t.is_nested else 'dense'}")
    if not all(isinstance(t, Tensor) and t.is_nested for t in tensors):
        raise RegardError(
            "either all of q, k and v are nested or none is",
            got=", ".join(kinds),
            accepted="three jagged tensors [B, H, j, D], or three dense ones",
        )


def _ragged(t: Any) -> Ragged:
    where = t._ragged_idx
    heads = t.dim() == 4
    if t.dim() not in (3, 4) or where != t.dim() - 2:
        raise RegardError(
            "a jagged tensor has its sequences along the last axis but one: [B, H, j, D], or "
            "[B, j, D] for one head",
            got=f"{t.dim()} axes, the ragged axis at {where}",
            do="[B, j, H, D] is t.transpose(1, 2) of that",
        )
    whole = t.transpose(1, 2) if heads else t
    whole = whole if whole.lengths() is None else whole.contiguous()
    values = whole.values()
    return Ragged(values if heads else values.unsqueeze(1), whole.offsets(), heads)


def _check_bias(bias: Bias | None, queries: Tensor, keys: Tensor) -> None:
    if isinstance(bias, Dense):
        raise RegardError(
            "dense: a tensor of pairs, for sequences that have no length in common",
            accepted="biases of distance: alibi(slopes) or relative(table)",
            do="call regard.attention once for each sequence",
        )
    if bias is not None and not (
        torch.equal(queries, keys) and getattr(bias, "offset", None) in (None, 0)
    ):
        raise RegardError(
            f"{bias!r} is aligned by one offset, and each of these sequences would need its own",
            got=f"lengths: q {queries.tolist()}, k {keys.tolist()}",
            accepted="as many queries as keys in each sequence",
            do="call regard.attention once for each sequence",
        )
