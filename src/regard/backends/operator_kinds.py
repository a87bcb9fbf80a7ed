"""Kinds of calls as operators receive them. Compiled programs repeat the same calls, and what is
decided for one kind is decided once. (calls/kinds.py has those of plain calls.)"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.values import Value

_ROOM = 1024
"""Kinds that are remembered."""
T = TypeVar("T")


def in_numbers(x: AttentionInputs) -> bool:
    """Whether a call is all in q, k, v and numbers. (Lists of a mask's tiles would be made where a
    CUDA graph's memory is, which others write to later.)"""
    return (
        isinstance(x.comparison, Dot)
        and x.bias is None
        and x.sink is None
        and not x.dropout
        and (x.mask is None or (x.mask.band() is not None and not x.mask.tensors()))
    )


def kind_of(
    text: str,
    integers: Sequence[int],
    floats: Sequence[float],
    softcap: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Hashable | None:
    """All that decides how a call in numbers is run; None where it must be looked at anew."""
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        return None
    if torch.is_autocast_enabled(q.device.type):
        return None
    return (
        text, tuple(integers), tuple(floats), softcap, Value.kinds_made, q.device,
        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        q.shape, q.stride(), q.dtype, q.data_ptr() % 16,
        k.shape, k.stride(), k.dtype, k.data_ptr() % 16,
        v.shape, v.stride(), v.dtype, v.data_ptr() % 16,
    )  # fmt: skip


def keep(known: dict[Hashable, T], kind: Hashable, found: T) -> T:
    """Remember something of a kind, and forget others where they are too many."""
    if len(known) >= _ROOM:
        known.clear()
    known[kind] = found
    return found
