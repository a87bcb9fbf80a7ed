"""The masks that a model of transformers asks for, symbolic where their parts are known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from regard.values import Shape
from regard.watching.huggingface.mask_functions import Places, recovered
from regard.watching.huggingface.symbolic_mask import SHARED, SymbolicMask
from regard.watching.whole_masks import EVERYTHING


def make_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """The mask of a call as transformers describes it: symbolic where its parts are known."""
    queries: tuple[Any, ...] = (q_length,)
    if cache_position is not None:
        # transformers before 5.3 names the positions of the queries.
        q_length, q_offset = len(cache_position), int(cache_position[0])
        device, queries = cache_position.device, (cache_position,)
    where = device if isinstance(device, torch.device) else torch.device(device)
    at = Places(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), where)
    alone = type(mask_function) is FunctionType and mask_function.__closure__ is None
    if alone and attention_mask is None and q_length > 1:
        made = _of_positions(mask_function, at, torch.is_inference_mode_enabled())
    else:
        made = _symbolic(mask_function, attention_mask, at)
    if made is None:
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        if cache_position is None:
            others |= {"q_offset": q_offset, "device": device}
        dense: Tensor = masking_utils.sdpa_mask(
            batch_size, *queries, kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, **others,
        )  # fmt: skip
        return dense
    return made


def _symbolic(
    function: Callable[..., Any], padding: Tensor | None, at: Places
) -> SymbolicMask | None:
    """None if a part of the mask is not known."""
    mask = recovered(function, padding, at, _kinds())
    if mask is None:
        return None
    # The next step of generating has one key more.
    make = SymbolicMask.shared if at.queries > 1 else SymbolicMask.of
    shape = Shape(at.batch, 1, at.queries, at.keys)
    return make(None if mask == EVERYTHING else mask, shape, at.device)


@lru_cache(SHARED)
def _of_positions(function: Callable[..., Any], at: Places, inference: bool) -> SymbolicMask | None:
    """Of a function that was made with nothing: the same for each text of these lengths. In
    inference mode tensors are others."""
    return _symbolic(function, None, at)


@cache
def _kinds() -> dict[CodeType, str]:
    """The parts transformers builds masks from, by their code."""
    causal, table = masking_utils.causal_mask_function, torch.zeros(1, 1, dtype=torch.int64)
    made_with: dict[str, tuple[Any, ...]] = {
        "and_masks": (causal,),
        "or_masks": (causal,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "chunked_overlay": (1, table[0]),
        "packed_sequence_mask_function": (table,),
        "blockwise_overlay": (table,),
        "padding_mask_function": (table,),
    }
    makers = {name: getattr(masking_utils, name, None) for name in made_with}
    plain = (causal, masking_utils.bidirectional_mask_function)
    return {function.__code__: function.__name__ for function in plain} | {
        make(*made_with[name]).__code__: name for name, make in makers.items() if make is not None
    }
