"""Models whose weights are what heads are said to do, and attention written out as n×n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

V, P = 8, 12
WIDTH = 2 * V + P + V
TOKEN, PLACE, BEFORE, OUT = slice(V), slice(V, V + P), slice(V + P, 2 * V + P), slice(-V, None)
SHARP, LOUD = 40.0, 5.0
"""Logits of what a head looks for, and what it adds to the prediction of what it copies."""


class Head(nn.Module):
    """Four matrices that start as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.zeros(WIDTH, P)) for _ in range(3))
        self.o = nn.Parameter(torch.zeros(P, WIDTH))

    def reads(self, part: slice, writes: slice, gain: float = 1.0) -> Head:
        with torch.no_grad():
            self.v[part, :V] = torch.eye(V)
            self.o[:V, writes] = gain * torch.eye(V)
        return self


def previous_token() -> Head:
    """Looks at the place before, and notes which token is there."""
    head = Head().reads(TOKEN, BEFORE)
    with torch.no_grad():
        head.q[PLACE, :P] = SHARP * torch.eye(P).roll(-1, 0).T
        head.k[PLACE, :P] = torch.eye(P)
    return head


def induction() -> Head:
    """Looks for a place whose token before is the token here, and predicts the token there."""
    head = Head().reads(TOKEN, OUT, LOUD)
    with torch.no_grad():
        head.q[TOKEN, :V] = SHARP * torch.eye(V)
        head.k[BEFORE, :V] = torch.eye(V)
    return head


def looks_at(place: int) -> Head:
    """Looks at one place, and makes nothing of it."""
    head = Head()
    with torch.no_grad():
        head.q[TOKEN, 0] = SHARP
        head.k[V + place, 0] = 1.0
    return head


def copies_from(place: int) -> Head:
    """Looks at one place, and predicts the token that is there."""
    return looks_at(place).reads(TOKEN, OUT, LOUD)


class Layer(nn.Module):
    def __init__(self, *heads: Head) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.stack([x @ getattr(head, name) for head in self.heads], 1) for name in "qkv"
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return sum((out[:, i] @ head.o for i, head in enumerate(self.heads)), x)


class Constructed(nn.Module):
    """Layers of heads over tokens and places, each in a part of the stream of its own."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.zeros(*ids.shape, WIDTH)
        x[..., TOKEN] = F.one_hot(ids, V).float()
        x[..., PLACE] = F.one_hot(torch.arange(ids.shape[1]), P).float()
        for layer in self.layers:
            x = layer(x)
        return x[..., OUT]


Change = Callable[[int, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""From the number of a layer, q, k, v [B, H, N, D] and which pairs are allowed."""
After = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From the number of a layer, the output, the weights and v."""


class Dense(nn.Module):
    """Layers with random weights and shared key heads, which can be run as n×n."""

    def __init__(self, layers: int = 3, heads: int = 4, groups: int = 2, width: int = 8) -> None:
        super().__init__()
        self.h, self.g, self.d = heads, groups, width
        wide = heads * width
        self.q = nn.ModuleList(nn.Linear(wide, wide) for _ in range(layers))
        self.kv = nn.ModuleList(nn.Linear(wide, 2 * groups * width) for _ in range(layers))
        self.o = nn.ModuleList(nn.Linear(wide, wide) for _ in range(layers))
        self.layers = nn.ModuleList(Attends() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for i, attends in enumerate(self.layers):
            x = x + self.o[i](attends(*self.split(i, x)).transpose(1, 2).flatten(2))
        return x

    def split(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q[i](x).unflatten(-1, (self.h, self.d)).transpose(1, 2)
        k, v = self.kv[i](x).unflatten(-1, (2, self.g, self.d)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def dense(self, x: Tensor, change: Change | None = None, after: After | None = None) -> Any:
        """The output, and what each layer had and gave."""
        had = []
        for i in range(len(self.layers)):
            q, k, v = self.split(i, x)
            k, v = (t.repeat_interleave(self.h // self.g, 1) for t in (k, v))
            allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            allowed = allowed.expand(len(x), self.h, -1, -1)
            if change is not None:
                q, k, v, allowed = change(i, q, k, v, allowed)
            s = (q @ k.mT * self.d**-0.5).masked_fill(~allowed, -torch.inf)
            p = s.softmax(-1).nan_to_num(0.0)
            out = p @ v
            if after is not None:
                out = after(i, out, p, v)
            had.append({"q": q, "k": k, "v": v, "p": p, "out": out})
            x = x + self.o[i](out.transpose(1, 2).flatten(2))
        return x, had


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
