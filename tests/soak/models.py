"""Small models that are trained: attention by a function, by PyTorch's module, by transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard

WIDTH, HEADS, TOKENS = 16, 2, 32


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)


class Plain(nn.Module):
    """One layer that calls PyTorch's function, and one that calls regard's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(F.scaled_dot_product_attention), Layer(regard.attention))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Llama(nn.Module):
    """A model of transformers, inside one that is not."""

    def __init__(self) -> None:
        super().__init__()
        transformers: Any = importlib.import_module("transformers")
        config = transformers.LlamaConfig(
            vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=HEADS, num_key_value_heads=1, use_cache=False,
        )  # fmt: skip
        self.inner = transformers.LlamaModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(inputs_embeds=x).last_hidden_state


def models() -> list[nn.Module]:
    """One of each kind that there is."""
    there = importlib.util.find_spec("transformers") is not None
    return [Plain(), MultiHead(), *([Llama()] if there else [])]


def batch(length: int = 6) -> Tensor:
    return torch.randn(2, length, WIDTH)
