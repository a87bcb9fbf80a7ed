"""Small things to look at."""

from __future__ import annotations

import torch

import regard
from regard import masks
from regard.watching.seen import Layer, Seen

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<!-- \"quoted\" 'twice' & amp;",
    "שלום \u202egnal",
    "👩‍👩‍👧‍👦",
    "x" * 10_000,
    "nul\x00nul",
    "\ud800",
    "\n",
    "",
    "{{7*7}}${7*7}`",
    "]]>\u2028",
]


def seen(n: int = 12, layers: int = 2, heads: int = 4, key_heads: int = 2) -> Seen:
    """Two causal layers of grouped heads."""
    torch.manual_seed(n)
    found = Seen("Toy")
    for place in range(layers):
        q = torch.randn(1, heads, n, 8) * 1.5
        k, v = torch.randn(2, 1, key_heads, n, 8).unbind()
        layer = Layer(f"layers.{place}.attn")
        layer.take(regard.trace(q, k, v, mask=masks.causal()), 0, 0, keep=True)
        found._layers[layer.path] = layer
    return found


def tokens(n: int) -> list[str]:
    return [f" word{i}" for i in range(n)]
