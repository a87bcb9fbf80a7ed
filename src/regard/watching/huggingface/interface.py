"""The functions that transformers calls while a model is watched. Where nobody watches, they do
what the model's own implementation does: a config is one for all threads."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    eager_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.calls.watchers import caller, watched
from regard.watching.graph_breaks import uncompiled
from regard.watching.huggingface.attention import attend
from regard.watching.huggingface.mask_maker import make_mask
from regard.watching.huggingface.modules import adds_masks
from regard.watching.huggingface.plain_calls import plain_output
from regard.watching.huggingface.switch import NAME, own_implementation, switched
from regard.watching.huggingface.symbolic_mask import SymbolicMask


# In compiled models both run between graphs: they read closures, values of masks and watchers, none
# of which a graph can hold.
@uncompiled
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **how: Any,
) -> tuple[Tensor, Tensor | None]:
    own = None if type(attention_mask) is SymbolicMask else _own_function(module)
    if own is None:
        before = caller.get()
        try:
            caller.set(module)
            if type(attention_mask) is SymbolicMask and dropout == 0:
                out = plain_output(module, query, key, value, attention_mask, how)
                if out is not None:
                    return out, None
            return attend(module, query, key, value, attention_mask, dropout=dropout, **how)
        finally:
            caller.set(before)
    answer: tuple[Tensor, Tensor | None] = own(
        module, query, key, value, attention_mask, dropout=dropout, **how
    )
    return answer


@uncompiled
def _make_mask(*args: Any, **how: Any) -> Any:
    config = how.get("config")
    held = None if watched() else switched.get(id(config))
    own = None if held is None else ALL_MASK_ATTENTION_FUNCTIONS.get(held.own, None)
    if own is None:
        own = eager_mask if adds_masks(type(config)) else make_mask
    return own(*args, **how)


def _own_function(module: nn.Module) -> Any:
    """What a module calls unwatched, if nobody watches here: a config is one for all threads."""
    own = None if watched() else own_implementation(module)
    if own == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return None if own is None else ALL_ATTENTION_FUNCTIONS.get(own, None)


# For good: another thread may have read it from a config that is switched back.
AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)
