"""Masks as other libraries write them, with their conventions carried over.

| source | what True means | causal aligns | a window of W sees |
|---|---|---|---|
| torch SDPA | may be seen | to the start | – |
| nn.MultiheadAttention | masked | – | – |
| Hugging Face | 1 may be seen | by position | W keys, the query counted |
| FlashAttention | – | to the end | W keys besides the query; -1 is open |

`docs/masks.md` says argument by argument what maps to what; a test holds each row of it.
"""

from __future__ import annotations

import sys
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.arguments import counted, described, refuse_no_tensor
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.causal import causal
from regard.masks.keep import ignore, keep
from regard.masks.window import window
from regard.values import whole


def from_sdpa(
    attn_mask: Bool[Tensor, "*bh q k"] | Float[Tensor, "variant q k"] | None = None,
    is_causal: bool = False,
) -> Mask | None:
    """The mask of `F.scaled_dot_product_attention`: True may be seen, causal from the start.

    The one float tensor it takes is a `CausalBias` of `torch.nn.attention.bias`.

    >>> print(from_sdpa(is_causal=True).draw(2, 3))
    ██····
    ████··
    """
    if is_causal_bias(attn_mask):
        return _from_causal_bias(attn_mask, is_causal)
    if attn_mask is not None:
        _refuse_floats(attn_mask, "from_sdpa")
    table = None if attn_mask is None else keep(_four_axes(attn_mask))
    return _all(table, causal(offset=0) if is_causal else None)


def is_causal_bias(attn_mask: object) -> bool:
    """Whether it is a `CausalBias`: a float tensor that says what is causal by its attributes. The
    numbers in it are whatever was in the memory."""
    # Importing its module brings the compiler, which takes seconds: who made one has imported it.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(attn_mask, module.CausalBias)


def _from_causal_bias(bias: Any, is_causal: bool) -> Mask:
    if is_causal:
        raise RegardError(
            "from_sdpa: a CausalBias says by itself what is causal",
            got=f"{bias.variant.name} and is_causal=True",
            accepted="one of the two",
            do="leave out is_causal",
        )
    # Those of a square are the same, and PyTorch takes them as is_causal=True.
    to_the_end = bias.variant.name == "LOWER_RIGHT" and bias.seq_len_q != bias.seq_len_kv
    return causal() if to_the_end else causal(offset=0)


def from_multihead(
    attn_mask: Bool[Tensor, "*bh q k"] | None = None,
    key_padding_mask: Bool[Tensor, "b k"] | None = None,
    heads: int | None = None,
) -> Mask | None:
    """The masks of `nn.MultiheadAttention`: True is masked. 3-D masks are [B·heads, Q, K].

    >>> import torch
    >>> print(from_multihead(key_padding_mask=torch.tensor([[False, False, True]])).draw(1, 3))
    ████··
    """
    parts: list[Mask | None] = []
    if attn_mask is not None:
        _refuse_floats(attn_mask, "from_multihead")
        if attn_mask.ndim == 3:
            if heads is None or attn_mask.shape[0] % heads:
                raise RegardError(
                    "from_multihead: a 3-D attn_mask stacks batch and heads on one axis",
                    got=f"{list(attn_mask.shape)} with heads={heads}",
                    accepted="heads= that divides the first axis",
                )
            attn_mask = attn_mask.unflatten(0, (-1, heads))
        parts.append(ignore(_four_axes(attn_mask)))
    if key_padding_mask is not None:
        _refuse_floats(key_padding_mask, "from_multihead")
        if key_padding_mask.ndim != 2:
            raise RegardError(
                "from_multihead: key_padding_mask has one row per batch entry",
                got=f"{list(key_padding_mask.shape)}",
                accepted="[B, K]",
                do="add the batch axis: key_padding_mask[None]",
            )
        parts.append(ignore(key_padding_mask[:, None, None, :]))
    return _all(*parts)


def from_huggingface(
    attention_mask: Bool[Tensor, "b k"] | Int[Tensor, "b k"] | None = None,
    *,
    is_causal: bool = False,
    sliding_window: int | None = None,
    offset: int | None = None,
) -> Mask | None:
    """A transformers model's masks: 1 may be seen; `sliding_window` counts the query itself.

    A causal window of W sees W keys; a two-sided one sees W on each side and the query.

    >>> print(from_huggingface(is_causal=True, sliding_window=2).draw(4))
    ██······
    ████····
    ··████··
    ····████
    """
    parts: list[Mask | None] = [causal(offset) if is_causal else None]
    if sliding_window is not None:
        sliding_window = counted("from_huggingface: sliding_window", sliding_window)
        left, right = (sliding_window - 1, None) if is_causal else (sliding_window, sliding_window)
        parts.append(window(left, right, offset=offset))
    if attention_mask is not None:
        refuse_no_tensor("attention_mask", attention_mask, "an integer or boolean tensor [B, K]")
        if attention_mask.ndim != 2 or attention_mask.is_floating_point():
            raise RegardError(
                "from_huggingface: attention_mask has one 0 or 1 per key",
                got=f"{attention_mask.dtype} {list(attention_mask.shape)}",
                accepted="an integer or boolean tensor [B, K]",
                do="wrap a 4-D boolean mask in masks.keep, a float one in biases.dense",
            )
        parts.append(keep(attention_mask.bool()[:, None, None, :]))
    return _all(*parts)


def from_flash(causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Mask | None:
    """The masks of FlashAttention: causal aligned to the end, -1 for an open side.

    >>> from_flash(causal=True, window_size=(128, -1))
    window(128)
    >>> from_flash(window_size=(4, 2))
    window(4, 2)
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise RegardError(
            "from_flash: window_size has a left and a right side",
            got=described(window_size),
            accepted="two whole numbers, -1 for an open side",
        )
    sides = [whole("from_flash: a side of window_size", side) for side in window_size]
    left, right = (None if side < 0 else side for side in sides)
    if causal:
        right = 0
    return None if left is None and right is None else window(left, right)


def _four_axes(mask: Tensor) -> Tensor:
    if mask.ndim not in (2, 4):
        raise RegardError(
            "the axes of this mask could mean several things",
            got=f"{list(mask.shape)}",
            accepted="[Q, K] or [B, H, Q, K]",
        )
    return mask[None, None] if mask.ndim == 2 else mask


def _refuse_floats(mask: Tensor, name: str) -> None:
    refuse_no_tensor(f"{name}: the mask", mask, "a tensor of torch.bool")
    if mask.is_floating_point():
        raise RegardError(
            f"{name}: a float mask is a bias that is added to the scores",
            got=str(mask.dtype),
            accepted="torch.bool",
            do="pass it as bias=regard.biases.dense(t)",
        )


def _all(*parts: Mask | None) -> Mask | None:
    whole: Mask | None = None
    for part in parts:
        if part is not None:
            whole = part if whole is None else whole & part
    return whole
