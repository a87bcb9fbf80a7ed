"""Attention modules: what a model is built of.

>>> import torch
>>> from regard import masks, nn
>>> attention = nn.MultiHeadAttention(512, 8)
>>> y, seen = attention(torch.randn(1, 20, 512), mask=masks.causal(), trace=True)
>>> seen.received().shape
torch.Size([1, 8, 20])
"""

from regard.nn.additive import AdditiveAttention
from regard.nn.blocks import DecoderBlock, DecoderTraces, EncoderBlock
from regard.nn.cache import Cache
from regard.nn.dot import DotAttention
from regard.nn.dropin import DropIn, DropInError, replace_attention
from regard.nn.linear import LinearAttention, elu_plus_one, linear_attention
from regard.nn.multihead import MultiHeadAttention
from regard.nn.processor import AttentionProcessor, attention_processors
from regard.nn.rotary import Rotary
from regard.nn.static import StaticAttention
from regard.nn.stored_weights import from_torch, load_weights

__all__ = [
    "AdditiveAttention",
    "AttentionProcessor",
    "Cache",
    "DecoderBlock",
    "DecoderTraces",
    "DotAttention",
    "DropIn",
    "DropInError",
    "EncoderBlock",
    "LinearAttention",
    "MultiHeadAttention",
    "Rotary",
    "StaticAttention",
    "attention_processors",
    "elu_plus_one",
    "from_torch",
    "linear_attention",
    "load_weights",
    "replace_attention",
]
