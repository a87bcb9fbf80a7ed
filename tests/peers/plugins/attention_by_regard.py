"""A pytest plugin that puts regard in the place of PyTorch's attention: function and module.

What a test computes with the math kernel alone is what it compares with: that stays PyTorch's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import outcome_file
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import regard
from regard import biases, masks
from regard.calls import dispatch
from regard.masks.convert import is_causal_bias
from regard.nn import DropIn

BACKEND = os.environ["REGARD_PEERS_BACKEND"]
_pytorch = F.scaled_dot_product_attention
_calls = 0
_ours = False
"""Whether regard is computing: what its own backends ask PyTorch for is PyTorch's."""


def _only_math() -> bool:
    cuda = torch.backends.cuda
    others = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    return cuda.math_sdp_enabled() and not any(enabled() for enabled in others)


@functools.wraps(_pytorch)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    causal_bias = is_causal_bias(attn_mask)
    if _ours or _only_math():
        # It knows PyTorch's function by its place, where there is another now.
        attn_mask = attn_mask._materialize(query.device) if causal_bias else attn_mask
        return _pytorch(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    bias = None
    if attn_mask is not None and not causal_bias:
        # [Q, K] stays as it is; PyTorch aligns other masks with the last axes of the scores.
        if attn_mask.ndim != 2:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        if attn_mask.is_floating_point():
            four = attn_mask if attn_mask.ndim > 2 else attn_mask[None, None]
            attn_mask, bias = None, biases.dense(four)
    return regard.attention(
        query, key, value, mask=masks.from_sdpa(attn_mask, is_causal), bias=bias, scale=scale,
        dropout=dropout_p, training=dropout_p > 0,
    )  # fmt: skip


def _by_backend(called: Callable[..., Any], able: bool) -> Callable[..., Any]:
    @functools.wraps(called)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _calls, _ours
        _calls += not _ours
        before, _ours = _ours, True
        try:
            return called(*args, **kwargs | ({"backend": BACKEND} if able else {}))
        finally:
            _ours = before

    return counted


# Who keeps no statistics cannot make a trace; asked for weights, a drop-in makes one.
dispatch.attention = regard.attention = _by_backend(dispatch.attention, True)
dispatch.trace = regard.trace = _by_backend(dispatch.trace, dispatch.BACKENDS[BACKEND].observes)
F.scaled_dot_product_attention = scaled_dot_product_attention
torch.nn.MultiheadAttention = DropIn
torch.nn.modules.activation.MultiheadAttention = DropIn
torch.nn.modules.transformer.MultiheadAttention = DropIn


def pytest_sessionfinish(session: pytest.Session) -> None:
    outcome_file.write(calls=_calls)
