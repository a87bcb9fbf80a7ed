"""The mask of a call over the keys that a layer holds, from the model's over all there were."""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Bool
from torch import Tensor

from regard import masks
from regard.caches.slots import Slots
from regard.errors import RegardError
from regard.masks.algebra import And, Mask, pairs
from regard.masks.causal import Causal
from regard.masks.keep import Keep
from regard.masks.padding import Padding
from regard.values import Shape
from regard.watching.huggingface.symbolic_mask import SymbolicMask


def over_held(given: Tensor | None, slots: Slots, query: Tensor, seen: int) -> Tensor:
    """What the model's mask [B, 1 or H, Q, seen] says of the keys in the slots."""
    B, H, Q, _ = query.shape
    if isinstance(given, SymbolicMask):
        known = given.lengths == (Q, seen) and _by_key(given)
        if known:
            return _symbolic(given, slots, query)
        # One row of pairs is no matrix.
        given = given.dense() if given.lengths == (1, seen) else given
    elif given is None and Q == 1:
        return _symbolic(None, slots, query)
    if given is None or isinstance(given, SymbolicMask) or given.shape[2:] != (Q, seen):
        raise RegardError(
            "a mask that a cache with missing keys cannot follow",
            got=f"{_shown(given)}, for {Q} more tokens after {seen - Q}",
            accepted="a causal mask, a mask of keys, both, or a tensor [B, H, Q, K] of all keys "
            "there were",
            do="use transformers' own cache for this call",
        )
    positions, filled = (_by_query_head(t, H) for t in (slots.positions, slots.filled))
    at = positions.long().expand(-1, -1, Q, -1)
    held = given.expand(B, H, Q, seen).gather(-1, at)
    return held & filled if held.dtype == torch.bool else held.masked_fill(~filled, -torch.inf)


def padding(given: Tensor | None) -> Bool[Tensor, "b 1 k"] | None:
    """Keys of a prompt that no token may ever see, where the model says so by its 2-D mask."""
    keys = _keys(given) if isinstance(given, SymbolicMask) else None
    if keys is None:
        return None
    hidden = ~keys[:, None]
    if bool(hidden[..., -1].any()):
        raise RegardError(
            "a text is padded on the right, so generated tokens would follow the padding",
            accepted="texts that are padded on the left, or one alone",
            do='tokenizer.padding_side = "left"; and if a prompt is read in parts '
            "(prefill_chunk_size), a first part that is longer than the padding",
        )
    return hidden if bool(hidden.any()) else None


def _symbolic(given: SymbolicMask | None, slots: Slots, query: Tensor) -> SymbolicMask:
    """New keys stand after all others, so that what is causal stays so."""
    B, H, Q, _ = query.shape
    causal = given is not None and any(isinstance(part, Causal) for part in _parts(given.mask))
    mask: Mask | None = masks.causal() if causal and Q > 1 else None
    keys = None if given is None else _keys(given)
    if keys is not None or not slots.full:
        seen = slots.filled
        if keys is not None:
            of_heads = keys[:, None].expand(*seen.shape[:2], -1)
            seen = seen & of_heads.gather(-1, slots.positions.long())
        held = masks.keep(_by_query_head(seen, H))
        mask = held if mask is None else mask & held
    return SymbolicMask.of(mask, Shape(B, H, Q, slots.filled.shape[-1]), query.device)


def _by_key(given: SymbolicMask) -> bool:
    """Whether a mask is made of causality up to the last key, and of what all queries see."""
    Q, K = given.lengths
    return all(
        part.offset in (None, K - Q) if isinstance(part, Causal) else _of_keys(part)
        for part in _parts(given.mask)
    )


def _keys(given: SymbolicMask) -> Bool[Tensor, "b k"] | None:
    """The keys that parts of a mask show to all queries alike; None where all are shown."""
    parts = [part for part in _parts(given.mask) if _of_keys(part)]
    if not parts:
        return None
    B, _, Q, K = given.shape
    shape, where = Shape(B, 1, Q, K), given.device
    query, keys = torch.arange(1, device=where), torch.arange(K, device=where)
    bound = reduce(And, parts).bind(shape, where)
    return pairs(bound, query, keys).expand(B, 1, 1, K)[:, 0, 0]


def _of_keys(part: Mask) -> bool:
    one_row = isinstance(part, Keep) and part.table.ndim == 4 and part.table.shape[1:3] == (1, 1)
    return one_row or isinstance(part, Padding)


def _parts(mask: Mask | None) -> list[Mask]:
    if isinstance(mask, And):
        return [*_parts(mask.left), *_parts(mask.right)]
    return [] if mask is None else [mask]


def _by_query_head(slots: Tensor, H: int) -> Tensor:
    """From [B, G, S] to [B, H, 1, S]."""
    return slots.repeat_interleave(H // slots.shape[1], 1)[:, :, None]


def _shown(given: Tensor | None) -> str:
    if given is None:
        return "no mask"
    if isinstance(given, SymbolicMask):
        return f"{given.mask!r} over {given.lengths[1]} keys"
    return f"{given.dtype} {list(given.shape)}"
