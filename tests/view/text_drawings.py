"""What the tests of the view share: drawings as text, and models small enough to know by hand."""

from __future__ import annotations

import io
import re

import torch
from rich.console import Console

import regard
from regard.seen import Seen


def drawn(thing: object, width: int = 80, **options: object) -> str:
    settings = {"color_system": None, "force_terminal": False, **options}
    console = Console(width=width, file=io.StringIO(), highlight=False, **settings)  # type: ignore[arg-type]
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def coloured(thing: object, width: int = 80) -> str:
    return drawn(
        thing, width, color_system="truecolor", force_terminal=True, no_color=False, _environ={}
    )


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class Layers(torch.nn.Module):
    """Attention layers over fixed vectors: each has its own, drawn from its number."""

    def __init__(self, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(i, heads) for i in range(layers))

    def forward(self, n: int) -> None:
        for layer in self.layers:
            layer(n)


class Layer(torch.nn.Module):
    def __init__(self, seed: int, heads: int) -> None:
        super().__init__()
        self.seed, self.heads = seed, heads

    def forward(self, n: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(self.seed)
        q, k = torch.randn(2, 1, self.heads, n, 8, generator=made) * 2
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)


def seen_model(
    n: int = 6, *, layers: int = 3, heads: int = 4, keep: str = "traces", calls: int = 1
) -> Seen:
    """What was seen of a small causal model that reads n tokens."""
    model = Layers(layers, heads)
    with torch.no_grad(), regard.watch(model, keep=keep) as seen:  # type: ignore[arg-type]
        for _ in range(calls):
            model(n)
    return seen
