"""Arguments of PyTorch's scaled_dot_product_attention, as regard's functions take them."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import biases, masks
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.convert import is_causal_bias

_CAUSAL = masks.from_sdpa(None, True)
"""One for all calls: a mask says once what it is."""


def mask_and_bias(attn_mask: Tensor | None, is_causal: bool) -> tuple[Mask | None, Bias | None]:
    """Its mask: True may be seen, floats are added to the logits, causal is from the start."""
    if attn_mask is None:
        return _CAUSAL if is_causal else None, None
    if is_causal_bias(attn_mask):
        return masks.from_sdpa(attn_mask, is_causal), None
    if attn_mask.ndim < 2:
        raise RegardError(
            "the axes of this mask could mean several things",
            got=str(list(attn_mask.shape)),
            accepted="[Q, K] or [B, H, Q, K]",
        )
    shown = four_axes(attn_mask)
    if attn_mask.dtype == torch.bool:
        return masks.from_sdpa(shown, is_causal), None
    return masks.from_sdpa(None, is_causal), biases.dense(shown)


def four_axes(t: Tensor) -> Tensor:
    """Leading axes as [B, H]: those before the last of them are the batch."""
    if t.ndim == 4:
        return t
    if t.ndim == 2:
        return t[None, None]
    return t.unsqueeze(0) if t.ndim == 3 else t.flatten(0, -4)
