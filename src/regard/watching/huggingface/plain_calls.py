"""A fast path for calls of queries, keys, values and a mask alone.

In a layer that generates, the time around such a call is mostly Python's. A call like an earlier
one, of whatever layer, is run without its arguments being checked anew; all others, and the first
of a kind, are left to `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from regard.calls.alike import alike
from regard.calls.kinds import kind_of
from regard.calls.remembered import found, recent
from regard.calls.watchers import gives_turned, watchers
from regard.watching.huggingface.attention import HARMLESS, collector, mask_of_none
from regard.watching.huggingface.cached_keys import lent_masks, waiting
from regard.watching.huggingface.symbolic_mask import SymbolicMask

_SAYS_NOTHING = HARMLESS - {"output_attentions"}
_WITH_A_MASK = _SAYS_NOTHING | {"scaling", "is_causal", "sliding_window"}
"""Arguments that say nothing beside a mask."""
_function_modes = torch._C._len_torch_function_stack


def plain_run(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    others: dict[str, Any],
) -> Callable[..., Any] | None:
    """What runs a call without dropout, outside of compilers; None where `attend` has to check
    it."""
    if watchers.get() or not _is_plain(module, others):
        return None
    if type(attention_mask) is SymbolicMask:
        mask, lengths = attention_mask.mask, attention_mask.lengths
        for like in attention_mask.alikes:
            run = like.found(query, key, value, mask, scaling)
            if run is not None:
                return run
    elif attention_mask is None and sliding_window is None and query.dim() == key.dim() == 4:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        lengths = query.size(2), key.size(2)
        mask = mask_of_none(*lengths) if causal else None
    else:
        return None
    kind = kind_of(query, key, value, mask, scaling, None, None, False)
    if kind is None:
        return None
    queries, keys, _ = kind[0]
    if lengths != (queries[2], keys[2]):
        return None
    known = found(kind)
    if known is None:
        return None
    if attention_mask is not None:
        found_again = alike(query, key, value, mask, scaling, kind, known.run)
        if found_again is not None:
            attention_mask.alikes = attention_mask.alikes.and_also(found_again)
    return known.run


def plain_output(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: SymbolicMask,
    how: dict[str, Any],
) -> Tensor | None:
    """The output of a call without dropout that is shown to watchers, turned for the model; None
    where `attend` has to check it."""
    scale, mask = how.get("scaling"), attention_mask.mask
    if not watchers.get() or not _is_plain(module, how, _WITH_A_MASK):
        return None
    # As in `attend`: what recognises a call also sees whether functions of tensors are replaced.
    with torch._C.DisableTorchFunction():
        known = recent(query, key, value, mask, scale, None, statistics=True)
        if known is None or attention_mask.lengths != (query.size(2), key.size(2)):
            return None
        before = gives_turned.get()
        try:
            gives_turned.set(True)
            out = known.shown(query, key, value, mask).rows.out
        finally:
            gives_turned.set(before)
        return out.transpose(1, 2).contiguous()


def _is_plain(
    module: nn.Module, others: dict[str, Any], known: Collection[str] = _SAYS_NOTHING
) -> bool:
    """Whether nothing but an output is asked for: by arguments other than those that are `known` to
    say nothing, or by whoever else looks at calls."""
    for name, given in others.items():
        if name not in known and given is not None and given is not False:
            return False
    return not (
        # Modes would intercept each function that is called here.
        _function_modes()
        or waiting.get() is not None
        or lent_masks.data
        or collector.get()
        or module.__dict__.get("masked_key_indices") is not None
    )
