"""The functions that transformers calls for `attn_implementation="regard"`."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from regard.errors import RegardWarning
from regard.watching.huggingface.attention import attend, attend_in_graph
from regard.watching.huggingface.mask_maker import make_mask
from regard.watching.huggingface.modules import adds_masks, by_hand
from regard.watching.huggingface.pages import read_pages
from regard.watching.huggingface.plain_calls import plain_run
from regard.watching.huggingface.switch import own_functions

NAME = "regard"


def attend_by_name(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention for models with this name. Others wrap it, and some give dropout by place."""
    function = attend_in_graph
    if not torch.compiler.is_compiling():
        run = None
        if dropout == 0:
            run = plain_run(
                module, query, key, value, attention_mask, scaling, is_causal, sliding_window, how
            )
        if run is not None:
            return run(query, key, value).transpose(1, 2).contiguous(), None
        function = attend
    return function(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
        is_causal=is_causal, sliding_window=sliding_window, **how,
    )  # fmt: skip


def _make_mask(*args: Any, **how: Any) -> Any:
    kind = type(how.get("config"))
    if by_hand(kind):
        if not torch.compiler.is_compiling():
            _warn_once(kind.__name__)
        return eager_mask(*args, **how)
    if adds_masks(kind):
        return eager_mask(*args, **how)
    # A graph holds tensors, and no masks that pass for them.
    return (sdpa_mask if torch.compiler.is_compiling() else make_mask)(*args, **how)


@cache
def _warn_once(config: str) -> None:
    text = (
        f'attn_implementation="{NAME}" changes nothing in models of {config}: they compute '
        'attention by hand, as with "eager". regard.watch follows what they compute.'
    )
    warnings.warn(RegardWarning(text), stacklevel=4)


own_functions.append(attend_by_name)
AttentionInterface.register(NAME, attend_by_name)
AttentionMaskInterface.register(NAME, _make_mask)
read_pages(NAME, attend_by_name)
