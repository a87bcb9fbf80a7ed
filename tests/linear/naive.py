"""Linear attention as the formulas say it: pair by pair and token by token, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def shares(
    q: Tensor, k: Tensor, feature, *, causal=False, lengths=None, ids=None, window=None
) -> Tensor:
    """φ(q)·φ(k) of allowed pairs, divided by their sum: [B, H, Q, K]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    allowed = visible(q.shape[2], k.shape[2], causal, lengths, ids, window)
    products = torch.where(allowed, feature(q) @ feature(k).mT, 0.0)
    total = products.sum(-1, keepdim=True)
    return products / torch.where(total == 0, 1.0, total)


def visible(n: int, m: int, causal=False, lengths=None, ids=None, window=None) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(m)
    allowed = torch.ones(1, 1, n, m, dtype=torch.bool)
    if causal:
        allowed = allowed & (j <= i)
    if window is not None:
        allowed = allowed & (i - j <= window[0]) & (j - i <= window[1])
    if lengths is not None:
        allowed = allowed & (j < lengths[:, None, None, None])
    if ids is not None:
        ids = ids if ids.ndim == 2 else ids[None]
        allowed = allowed & (ids[:, None, :, None] == ids[:, None, None, :])
    return allowed


def draw(n, m=None, *, heads=(4, 2), width=5, value=3, seed=0, learns=True):
    source = torch.Generator().manual_seed(seed)
    m = n if m is None else m
    shapes = [(heads[0], n, width), (heads[1], m, width), (heads[1], m, value)]
    return [
        torch.randn(2, *shape, generator=source, dtype=torch.float64).requires_grad_(learns)
        for shape in shapes
    ]


def recurrence(q, k, v, log_decay=None, beta=None, *, scale=None, lengths=None, ids=None):
    """Token by token: the weights of every value in every output, [B, H, N, N]. The state is kept
    as the weights of all values, so nothing of the chunked form is in it."""
    group = q.shape[1] // k.shape[1]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    B, H, n, M = q.shape
    k = k.repeat_interleave(group, 1)
    rows = []
    # Which values make up each channel of the state: [B, H, M, N].
    state = q.new_zeros(B, H, M, n)
    for i in range(n):
        fade = q.new_ones(B, H, 1)
        if log_decay is not None:
            part = log_decay.repeat_interleave(group, 1)[:, :, i].exp()
            fade = part if part.ndim == 3 else part[..., None]
        here = q.new_ones(B, 1, 1)
        if lengths is not None:
            here = (i < lengths)[:, None, None].to(q)
            fade = torch.where(here > 0, fade, 1.0)
        if ids is not None and i:
            ids = ids if ids.ndim == 2 else ids[None]
            fade = fade * (ids[:, i] == ids[:, i - 1])[:, None, None]
        state = state * fade[..., None]
        key = k[:, :, i] * here
        new = torch.nn.functional.one_hot(torch.tensor(i), n).to(q).expand(B, H, n)
        if beta is None:
            written = new
        else:
            rate = beta.repeat_interleave(group, 1)[:, :, i, None]
            written = rate * (new - (key[..., None] * state).sum(-2))
        state = state + key[..., None] * written[..., None, :]
        rows.append((q[:, :, i, :, None] * state).sum(-2))
    return torch.stack(rows, 2)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
