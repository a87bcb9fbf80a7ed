"""Transformer blocks, pre-norm: attention, then a feed-forward network at each position."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from regard import masks
from regard.arguments import counted, refuse_dropout
from regard.biases.bias import Bias
from regard.masks import Mask
from regard.nn.cache import Cache
from regard.nn.multihead import MultiHeadAttention
from regard.nn.rotary import Rotary
from regard.traces import Trace


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + network(norm(x)).

    With `mask=masks.causal()` and a cache it is the block of a decoder-only language model.
    `hidden` is the width of the feed-forward network, 4·d_model unless said.

    >>> import torch
    >>> from regard import masks, nn
    >>> block = nn.EncoderBlock(64, 8)
    >>> block(torch.randn(2, 10, 64), mask=masks.padding([10, 6])).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        bias: bool = False,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        counted("d_model", d_model)
        refuse_dropout(dropout)
        self.attention_norm = nn.LayerNorm(d_model, bias=bias)
        self.attention = MultiHeadAttention(
            d_model, heads, kv_heads=kv_heads, bias=bias, rotary=rotary, qk_norm=qk_norm,
            dropout=dropout,
        )  # fmt: skip
        self.network_norm = nn.LayerNorm(d_model, bias=bias)
        self.network = _network(d_model, hidden, bias, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        cache: Cache | None = None,
        trace: bool = False,
    ) -> Float[Tensor, "b n d"] | tuple[Float[Tensor, "b n d"], Trace]:
        """The block's output, and the Trace of its attention when asked."""
        answer = self.attention(
            self.attention_norm(x), mask=mask, bias=bias, cache=cache, trace=trace
        )
        mixed, seen = answer if trace else (answer, None)
        x = x + self.dropout(mixed)
        x = x + self.dropout(self.network(self.network_norm(x)))
        return x if seen is None else (x, seen)


class DecoderTraces(NamedTuple):
    """What a decoder block looked at: its own past, and the memory.

    >>> DecoderTraces._fields
    ('own', 'memory')
    """

    own: Trace
    memory: Trace


class DecoderBlock(nn.Module):
    """x attends to its own past, then to a memory, then passes through a network; all pre-norm.

    `rotary` positions and the cache concern x's own past only.

    >>> import torch
    >>> from regard import masks, nn
    >>> block = nn.DecoderBlock(64, 8)
    >>> x, memory = torch.randn(2, 5, 64), torch.randn(2, 9, 64)
    >>> y, seen = block(x, memory, memory_mask=masks.padding([9, 4]), trace=True)
    >>> seen.own.lse.shape, seen.memory.received().shape
    (torch.Size([2, 8, 5]), torch.Size([2, 8, 9]))
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        memory_width: int | None = None,
        hidden: int | None = None,
        bias: bool = False,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        counted("d_model", d_model)
        refuse_dropout(dropout)
        self.own_norm = nn.LayerNorm(d_model, bias=bias)
        self.own = MultiHeadAttention(
            d_model, heads, kv_heads=kv_heads, bias=bias, rotary=rotary, qk_norm=qk_norm,
            dropout=dropout,
        )  # fmt: skip
        self.memory_norm = nn.LayerNorm(d_model, bias=bias)
        self.memory = MultiHeadAttention(
            d_model, heads, kv_heads=kv_heads, key_width=memory_width, value_width=memory_width,
            bias=bias, qk_norm=qk_norm, dropout=dropout,
        )  # fmt: skip
        self.network_norm = nn.LayerNorm(d_model, bias=bias)
        self.network = _network(d_model, hidden, bias, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m e"],
        *,
        mask: Mask | None = masks.causal(),  # noqa: B008  a mask is a value
        memory_mask: Mask | None = None,
        cache: Cache | None = None,
        trace: bool = False,
    ) -> Float[Tensor, "b n d"] | tuple[Float[Tensor, "b n d"], DecoderTraces]:
        """The block's output, and the traces of both attentions when asked."""
        answer = self.own(self.own_norm(x), mask=mask, cache=cache, trace=trace)
        mixed, own = answer if trace else (answer, None)
        x = x + self.dropout(mixed)
        answer = self.memory(self.memory_norm(x), memory, mask=memory_mask, trace=trace)
        mixed, read = answer if trace else (answer, None)
        x = x + self.dropout(mixed)
        x = x + self.dropout(self.network(self.network_norm(x)))
        return x if own is None or read is None else (x, DecoderTraces(own, read))


def _network(d_model: int, hidden: int | None, bias: bool, dropout: float) -> nn.Sequential:
    hidden = 4 * d_model if hidden is None else counted("hidden", hidden)
    return nn.Sequential(
        nn.Linear(d_model, hidden, bias=bias),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, d_model, bias=bias),
    )
