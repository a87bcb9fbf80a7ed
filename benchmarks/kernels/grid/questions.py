"""What questions to a trace cost, in forward passes of cuDNN."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import regard
from benchmarks.kernels.grid.checks import Named, why_wrong
from benchmarks.kernels.grid.clock import Run, in_turns
from benchmarks.kernels.grid.peers import Call

STRONGEST, SOME = 8, 64
MAPS = (256, 1024)
Asked = dict[str, Callable[[], Tensor]]


def asked_of(t: regard.Trace) -> Asked:
    n = t.inputs.shape.K
    keys = torch.arange(0, n, max(1, n // SOME), device=t.inputs.q.device)[:SOME]
    found: Asked = {
        "received()": t.received,
        f"top({STRONGEST})": lambda: t.top(STRONGEST).values,
        "mean_logit": lambda: t.mean_logit,
        f"mass of {SOME} keys": lambda: t.mass(keys),
    }
    return found | {f"map({m})": lambda m=m: t.map(m) for m in MAPS}


def formula(call: Call, dtype: torch.dtype) -> Named:
    """Every answer for the last head, from all its weights at once."""
    q, k = call.q[-1, -1].to(dtype), call.k[-1, -1].to(dtype)
    n = len(q)
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
    s = (q @ k.T * q.shape[-1] ** -0.5).masked_fill_(hidden, -math.inf)
    p = torch.softmax(s, -1)
    many = torch.arange(1, n + 1, device=q.device)
    found = {
        "received()": p.sum(0),
        f"top({STRONGEST})": p.topk(STRONGEST, -1).values,
        "mean_logit": s.masked_fill_(hidden, 0).sum(-1) / many.to(dtype),
        f"mass of {SOME} keys": p[:, :: max(1, n // SOME)][:, :SOME].sum(-1),
    }
    for cells in MAPS:
        m = min(cells, n)
        found[f"map({cells})"] = p.unflatten(1, (m, -1)).unflatten(0, (m, -1)).mean((1, 3))
    return found


def why_wrong_looks(call: Call, asked: Asked) -> list[str]:
    truth, plain = formula(call, torch.float64), formula(call, call.q.dtype)
    problems = [
        why_wrong({name: ask()[-1, -1]}, {name: truth[name]}, {name: plain[name]})
        for name, ask in asked.items()
    ]
    return [f"looking, {call.case}: {problem}" for problem in problems if problem]


def milliseconds(call: Call, asked: Asked, peer: Run, device: str) -> dict[str, float]:
    runs = [Run(name, ask) for name, ask in asked.items()]
    return in_turns([*runs, peer], device)
