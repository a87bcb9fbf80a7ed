"""Eviction by the book: all tokens at once, n×n weights, and a table of who may still see whom."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from regard import caches

tables: dict[int, Tensor] = {}
"""For each layer [G, N, N]: whether a query may see what a key head holds."""
weights: dict[int, Tensor] = {}
"""For each layer [H, N, N]: what the last forward pass gave."""


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **how: Any) -> Any:
    group, N = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    logits = (q @ k.mT)[0] * (how.get("scaling") or q.shape[-1] ** -0.5)
    visible = tables[module.layer_idx][:, :N, :N].repeat_interleave(group, 0)
    weights[module.layer_idx] = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights[module.layer_idx][None] @ v).transpose(1, 2), None


transformers.AttentionInterface.register("by_the_book", attend)


def scored(policy: Any, layer: int, rows: range, G: int, held: list[list[int]]) -> Any:
    """A score for every token that each key head holds, or None where nothing is to be chosen."""
    N = weights[layer].shape[-1]
    by_head = weights[layer].view(G, -1, N, N).sum(1)
    if isinstance(policy, caches.HeavyHitters):
        return [{i: float(by_head[g, :, i].sum()) for i in held[g]} for g in range(G)]
    if len(rows) < policy.window:
        return None
    votes = by_head[:, -policy.window :].sum(1)
    found = []
    for g in range(G):
        old = held[g][: len(held[g]) - policy.window]
        pooled = {"max": max_pool1d, "mean": avg_pool1d}[policy.pool](
            votes[g, old][None], policy.width, stride=1, padding=policy.width // 2
        )[0]
        found.append(dict(zip(old, pooled.tolist(), strict=True)))
    return found


def chosen(policy: Any, layer: int, rows: range, held: list[list[int]]) -> list[list[int]]:
    """What each key head holds after a call."""
    G, own, per_head = len(held), policy, isinstance(policy, caches.PerHead)
    own = policy.policy if per_head else policy
    latest = own.recent if isinstance(own, caches.HeavyHitters) else own.window
    scores = scored(own, layer, rows, G, held)
    if scores is None:
        return held
    safe = [set(head[len(head) - latest :]) for head in held]
    ranked = [
        sorted(set(head) - safe[g], key=lambda i: -scores[g][i]) for g, head in enumerate(held)
    ]
    if not per_head:
        return [sorted(safe[g] | set(ranked[g][: own.budget - latest])) for g in range(G)]
    for g in range(G):
        while ranked[g] and len(safe[g]) < int(policy.floor * own.budget):
            safe[g].add(ranked[g].pop(0))
    pool = sorted(
        ((g, i) for g in range(G) for i in ranked[g]), key=lambda at: -scores[at[0]][at[1]]
    )
    for g, i in pool[: max(G * own.budget - sum(map(len, safe)), 0)]:
        safe[g].add(i)
    return [sorted(head) for head in safe]


@torch.no_grad()
def generate(model: Any, text: Tensor, policy: Any, many: int, G: int) -> Any:
    """Tokens, logits of each step, and what each layer and key head holds at the end."""
    n = text.shape[1]
    size, layers = n + many, model.config.num_hidden_layers
    tables.update({i: torch.ones(G, size, size, dtype=torch.bool).tril() for i in range(layers)})
    held = [[list(range(n)) for _ in range(G)] for _ in range(layers)]
    rows, logits = range(n), []
    for step in range(many):
        found = model(text, use_cache=False).logits[:, -1]
        logits.append(found)
        for layer in range(layers):
            if step:
                held[layer] = [[*head, rows[-1]] for head in held[layer]]
            held[layer] = chosen(policy, layer, rows, held[layer])
            for g in range(G):
                later = tables[layer][g, rows[-1] + 1 :, : rows[-1] + 1]
                later[:] = False
                later[:, held[layer][g]] = True
        text = torch.cat([text, found.argmax(-1, keepdim=True)], 1)
        rows = range(text.shape[1] - 1, text.shape[1])
    return text, torch.stack(logits, 1), held
