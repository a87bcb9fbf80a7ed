"""Sequences of different lengths, packed end to end into one call: jagged nested tensors, or tokens
with cu_seqlens.

Nothing is padded: the packed call has as many queries and keys as there are tokens, under a mask
that keeps sequences apart and counts places from the start of each.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard.between_graphs import between_graphs
from regard.biases.bias import Bias
from regard.biases.dense import Dense
from regard.biases.pairwise import Pairwise
from regard.calls.kinds import cannot_change, encoded
from regard.errors import RegardError
from regard.inputs import check_kinds
from regard.jagged.cu_seqlens import Ends, both, check_tokens, checked, read
from regard.masks.algebra import Mask
from regard.masks.packed import Packed
from regard.values import runs_as_written


@dataclass(frozen=True)
class Ragged:
    """Where sequences that stand end to end begin and end, and how their owner holds them."""

    ends: Ends
    offsets: Tensor
    """The same on the device."""
    nested: bool
    heads: bool = True

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in itertools.pairwise(self.ends)]

    def of(self, answer: Tensor) -> Tensor:
        """An answer [1, H, n, ...] as sequences: [B, H, j, ...], or [B, j, ...] without heads; or
        as tokens [n, H, ...]."""
        if not self.nested:
            # Whoever holds tokens goes on with out.view(n, -1).
            return answer[0].transpose(0, 1).contiguous()
        nested: Tensor = torch.nested.nested_tensor_from_jagged(
            answer[0] if self.heads else answer[0, 0],
            offsets=self.offsets.to(answer.device),
            jagged_dim=2 if self.heads else 1,
        )
        return nested


class Sequences(NamedTuple):
    """The sequences of one call."""

    queries: Ragged
    keys: Ragged


@dataclass(frozen=True)
class JaggedInputs:
    """One call for all sequences: q, k and v [1, H, n, D]."""

    sequences: Sequences
    qkv: tuple[Tensor, Tensor, Tensor]
    mask: Mask | None


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
    (queries, q), (keys, k), (values, v) = (_ragged(t) for t in (q, k, v))
    sizes = [len(t) for t in (queries, keys, values)]
    if len(set(sizes)) > 1:
        raise RegardError(
            "q, k and v have different batch sizes",
            got=f"q {sizes[0]}, k {sizes[1]}, v {sizes[2]} sequences",
            accepted="one batch size",
        )
    if keys.ends != values.ends:
        raise RegardError(
            "each key needs its value",
            got=f"lengths: k {keys.lengths}, v {values.lengths}",
            accepted="k and v with the same lengths",
        )
    return _together(Sequences(queries, keys), (q, k, v), mask, bias)


def pack_tokens(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, mask: Mask | None, bias: Bias | None
) -> JaggedInputs:
    """Tokens that were cut into sequences as one call."""
    check_tokens(q, k, v)
    for_queries, for_keys = both(cu_seqlens)
    if for_queries is for_keys:
        ends = checked("cu_seqlens", for_queries, "q", q)
        queries = keys = Ragged(ends, for_queries, nested=False)
        if len(q) != len(k):
            # They cannot both end where it does.
            checked("cu_seqlens", for_keys, "k", k)
    else:
        queries = Ragged(checked("cu_seqlens_q", for_queries, "q", q), for_queries, nested=False)
        keys = Ragged(checked("cu_seqlens_k", for_keys, "k", k), for_keys, nested=False)
        if len(queries) != len(keys):
            raise RegardError(
                "queries and keys are cut into different numbers of sequences",
                got=f"q {len(queries)}, k {len(keys)} sequences",
                accepted="cu_seqlens_q and cu_seqlens_k as long as each other",
                do="give a sequence that has no queries, or no keys, the same end twice",
            )
    packed = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return _together(Sequences(queries, keys), packed, mask, bias)


def _together(
    sequences: Sequences,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    bias: Bias | None,
) -> JaggedInputs:
    """One call for all; a sequence that is alone needs nothing to keep it apart."""
    check_kinds(mask, None, bias)
    # The values of a nested tensor may go on behind its last sequence.
    tokens = (0, qkv[0].shape[2]), (0, qkv[1].shape[2])
    if (sequences.queries.ends, sequences.keys.ends) != tokens:
        _check_bias(bias, sequences)
        mask = _mask_of(sequences.queries.ends, sequences.keys.ends, mask)
    return JaggedInputs(sequences, qkv, mask)


_MASKS: OrderedDict[tuple[Any, ...], Packed] = OrderedDict()
_ROOM = 8
"""Masks that are remembered: the layers of a model share one, and what backends make of it."""


def _mask_of(queries: Ends, keys: Ends, mask: Mask | None) -> Packed:
    told = () if mask is None else encoded(mask) if cannot_change(mask) else None
    # What is made within a transform, or where no gradient can be, is not for calls outside of it.
    key = queries, keys, told, torch.is_inference_mode_enabled()
    lasts = told is not None and runs_as_written()
    found = _MASKS.get(key) if lasts else None
    if found is None:
        lengths = _lengths(queries)
        found = Packed(mask, lengths, lengths if queries == keys else _lengths(keys))
        if lasts:
            _MASKS[key] = found
            while len(_MASKS) > _ROOM:
                _MASKS.popitem(last=False)
    return found


def _lengths(ends: Ends) -> Tensor:
    # On a CPU they are what backends are given, who ask whether somebody wrote into them.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        return torch.tensor(ends).diff()


def _check_layouts(*tensors: Tensor) -> None:
    nested = [isinstance(t, Tensor) and t.is_nested for t in tensors]
    for name, t, is_nested in zip("qkv", tensors, nested, strict=True):
        if is_nested and t.layout == torch.strided:
            raise RegardError(
                f"{name} is a nested tensor in the strided layout, which has few operators",
                accepted="nested tensors in the jagged layout",
                do="make it with layout=torch.jagged",
            )
    if not all(nested):
        kinds = (
            f"{name} {'nested' if n else 'dense'}" for name, n in zip("qkv", nested, strict=True)
        )
        raise RegardError(
            "either all of q, k and v are nested or none is",
            got=", ".join(kinds),
            accepted="three jagged tensors [B, H, j, D], or three dense ones",
        )


def _ragged(t: Any) -> tuple[Ragged, Tensor]:
    """How a jagged tensor is cut, and all of it as [1, H, n, D]."""
    where = t._ragged_idx
    heads = t.dim() == 4
    if t.dim() not in (3, 4) or where != t.dim() - 2:
        raise RegardError(
            "a jagged tensor has its sequences along the last axis but one: [B, H, j, D], or "
            "[B, j, D] for one head",
            got=f"{t.dim()} axes, the ragged axis at {where}",
            do="[B, j, H, D] is t.transpose(1, 2) of that",
        )
    offsets, values = t.offsets(), t.values()
    if t.lengths() is not None:
        offsets, values = _without_gaps(offsets, t.lengths(), values)
    ragged = Ragged(read(offsets), offsets, nested=True, heads=heads)
    # Where the ragged axis is the third, values are [H, n, D].
    return ragged, values[None] if heads else values[None, None]


def _without_gaps(offsets: Tensor, lengths: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences that begin at offsets and leave gaps, end to end. (Gradients of PyTorch's own
    `contiguous` end in an error here.)"""
    ends = F.pad(lengths.cumsum(0), (1, 0))
    moved = (offsets[:-1] - ends[:-1]).repeat_interleave(lengths)
    places = torch.arange(len(moved), device=values.device) + moved
    return ends, values.index_select(-2, places)


def _check_bias(bias: Bias | None, sequences: Sequences) -> None:
    if isinstance(bias, (Dense, Pairwise)):
        what = "a tensor" if isinstance(bias, Dense) else "a function"
        raise RegardError(
            f"{bias._called()}: {what} of pairs, for sequences that have no length in common",
            accepted="biases of distance: alibi(slopes) or relative(table)",
            do="call regard.attention once for each sequence",
        )
    alike = sequences.queries.ends == sequences.keys.ends
    if bias is not None and not (alike and getattr(bias, "offset", None) in (None, 0)):
        raise RegardError(
            f"{bias!r} is aligned by one offset, and each of these sequences would need its own",
            got=f"lengths: q {sequences.queries.lengths}, k {sequences.keys.lengths}",
            accepted="as many queries as keys in each sequence",
            do="call regard.attention once for each sequence",
        )
