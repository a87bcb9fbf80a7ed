"""The order in which one projection gives queries, keys and values. The same name means one order
in most families, and another in some."""

from __future__ import annotations

from typing import Literal

from torch import nn

Layout = Literal["side by side", "head by head", "in four parts"]
"""All queries, then all keys, then all values; query, key and value of the first head, then of the
next; or queries, values and keys of a quarter of the heads, then of the next quarter."""

SIDE_BY_SIDE = ("c_attn", "qkv_proj", "qkv", "Wqkv")
HEAD_BY_HEAD = ("query_key_value",)
CROSS = ("q_attn", "c_attn")
"""Cross-attention of GPT-2: one for queries, one that gives all keys, then all values."""
_BY_HEAD = {
    "DisentangledSelfAttention": "in_proj",
    "GPTBigCodeAttention": "c_attn",
    "MiniMaxLightningAttention": "qkv_proj",
}
_IN_FOUR_PARTS = {"CodeGenAttention": "qkv_proj"}


def layout_of(module: nn.Module, name: str) -> Layout:
    """The layout of a module's projection of some name.

    >>> from torch import nn
    >>> layout_of(nn.Module(), "qkv"), layout_of(nn.Module(), "query_key_value")
    ('side by side', 'head by head')
    """
    kinds = [kind.__name__ for kind in type(module).__mro__]
    if any(_IN_FOUR_PARTS.get(kind) == name for kind in kinds):
        return "in four parts"
    # GPTBigCode with one key head for all has all queries first.
    by_head = any(_BY_HEAD.get(kind) == name for kind in kinds)
    if name in HEAD_BY_HEAD or (by_head and not getattr(module, "multi_query", False)):
        return "head by head"
    return "side by side"
