"""Small things to look at."""

from __future__ import annotations

import torch

import regard
from regard import masks
from regard.seen import Layer, Seen

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


def drawn(side: int) -> torch.Tensor:
    """A picture `[3, side, side]`: a sun over a hill."""
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    down, across = down / side, across / side
    picture = torch.stack([0.45 + 0.3 * down, 0.65 + 0.15 * down, 0.92 - 0.1 * down])
    sun = (across - 0.75) ** 2 + (down - 0.25) ** 2 < 0.02
    hill = down > 0.7 + 0.1 * torch.sin(6 * across)
    for where, colour in ((sun, (1.0, 0.85, 0.3)), (hill, (0.3, 0.55, 0.25))):
        picture[:, where] = torch.tensor(colour)[:, None]
    return picture
