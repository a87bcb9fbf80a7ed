"""Masks recovered from functions of indices.

Hugging Face's library describes a mask by a function of batch, head, query and key, put together
from a few known parts. A part is recognised by its code, what it was made with is read from its
closure, and it becomes a mask of regard. What is not recognised has to be built dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard import masks
from regard.calls.kinds import unshared
from regard.masks.algebra import Mask
from regard.watching.whole_masks import EVERYTHING, both, either

_CAUSAL = masks.causal()


class Places(NamedTuple):
    """How many queries and keys there are, and at which position the first of each stands."""

    batch: int
    queries: int
    keys: int
    query: int
    key: int
    device: torch.device

    @property
    def offset(self) -> int | None:
        """Where query 0 stands among the keys; None when the last stands at the last key."""
        offset = self.query - self.key
        return None if offset == self.keys - self.queries else offset

    def of_keys(self, table: Tensor) -> Tensor | None:
        """The columns of [B, positions] that belong to the keys."""
        part = table.to(self.device)[:, self.key : self.key + self.keys]
        return part if part.shape[1] == self.keys else None

    def documents(self, ids: Tensor | None) -> Mask | None:
        """Queries see keys of their own id, where every query stands among the keys."""
        among = 0 <= self.query - self.key <= self.keys - self.queries
        return masks.documents(ids, offset=self.offset) if among and ids is not None else None


def recovered(
    function: Callable[..., Any], padding: Tensor | None, at: Places, kinds: Mapping[CodeType, str]
) -> Mask | None:
    """The mask that a function of indices stands for, and a 2-D mask of real keys; None if a part
    is not known."""
    mask = _recovered(function, at, kinds)
    if mask is None or padding is None:
        return mask
    return both(mask, _padding(padding, at))


def _recovered(
    function: Callable[..., Any], at: Places, kinds: Mapping[CodeType, str]
) -> Mask | None:
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    kind = kinds.get(code)
    if kind == "causal_mask_function":
        # At every step of generating: of one mask for all, the key is computed once.
        offset = at.offset
        return _CAUSAL if offset is None else masks.causal(offset)
    cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    held = dict(zip(code.co_freevars, cells, strict=True))
    match kind:
        case "bidirectional_mask_function":
            return EVERYTHING
        case ("and_masks" | "or_masks") as kind:
            parts = [_recovered(part, at, kinds) for part in held["mask_functions"]]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            return reduce(both if kind == "and_masks" else either, known)
        case "sliding_window_overlay" if held["sliding_window"] > 0:
            return masks.window(held["sliding_window"] - 1, None, offset=at.offset)
        case "sliding_window_bidirectional_overlay" if held["sliding_window"] >= 0:
            return masks.window(held["sliding_window"], held["sliding_window"], offset=at.offset)
        case "chunked_overlay":
            places = torch.arange(at.keys, device=at.device) + at.key
            padded = held["left_padding"].to(at.device)[:, None]
            return at.documents((places - padded).div(held["chunk_size"], rounding_mode="floor"))
        case "packed_sequence_mask_function":
            return at.documents(at.of_keys(held["packed_sequence_mask"]))
        case "blockwise_overlay":
            ids = at.of_keys(held["block_sequence_ids"])
            inside = at.documents(ids)
            return None if ids is None or inside is None else inside & _keys(ids >= 0)
        case "padding_mask_function":
            return _padding(held["padding_mask"], at)
    return None


def _padding(mask: Tensor, at: Places) -> Mask:
    """A 2-D mask, 1 where a key is real; keys past its end are not."""
    missing = max(at.key + at.keys - mask.shape[1], 0)
    real = at.of_keys(F.pad(mask.bool(), (0, missing)))
    assert real is not None
    if bool(real.all()):
        return EVERYTHING
    lengths = real.sum(1)
    if torch.equal(torch.arange(at.keys, device=real.device) < lengths[:, None], real):
        return unshared(masks.padding(lengths))
    # Padding made a copy of what the model was given.
    return unshared(_keys(real))


def _keys(real: Tensor) -> Mask:
    return masks.keep(real[:, None, None, :])
