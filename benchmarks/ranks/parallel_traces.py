"""What `parallel.trace` takes beside `parallel.attention`, in CPU time, on gloo ranks.

CPU time of a process does not count what it waits for: not other ranks, nor other programs that
have the core. Each round makes every call once, in an order that changes; a ratio is that of one
round, summed over the ranks. `attention` is there twice, so the same figures of a call beside
itself say how much a ratio is worth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measurement import middle
from regard import masks, parallel

METHODS = ("ulysses", "all_gather", "ring")
PASSES = ("forward", "and backward")
RUNS = ("attention", "trace", "attention again")
HEADS, WIDTH = 8, 64
BAR = 1.05

Taken = dict[tuple[int, str, str], dict[str, list[float]]]
"""For tokens, method and pass: CPU seconds of each run, round by round."""


class Looking:
    """What each rank measures."""

    def __init__(self, quick: bool) -> None:
        # A forward pass takes a fourth of the time, and what looking adds is a larger part of it.
        self.sizes, each = ([256], (2, 2)) if quick else ([2048, 4096], (48, 24))
        self.rounds = dict(zip(PASSES, each, strict=True))

    def __call__(self) -> Taken:
        return {
            (tokens, method, kind): self._taken(tokens, method, kind)
            for tokens in self.sizes
            for method in METHODS
            for kind in PASSES
        }

    def _taken(self, tokens: int, method: str, kind: str) -> dict[str, list[float]]:
        layout = parallel.zigzag(tokens, dist.get_world_size())
        draw = torch.Generator().manual_seed(dist.get_rank())
        n = layout.lengths[dist.get_rank()]
        mine = [torch.randn(1, HEADS, n, WIDTH, generator=draw).requires_grad_() for _ in range(3)]
        told: dict[str, Any] = {"layout": layout, "mask": masks.causal(), "method": method}

        def attend() -> torch.Tensor:
            return parallel.attention(*mine, **told)

        def look() -> torch.Tensor:
            return parallel.trace(*mine, **told).out

        calls = dict(zip(RUNS, (attend, look, attend), strict=True))
        return _in_turns(calls, self.rounds[kind], learns=kind != "forward")


def _in_turns(
    calls: dict[str, Callable[[], torch.Tensor]], rounds: int, *, learns: bool
) -> dict[str, list[float]]:
    def run(call: Callable[[], torch.Tensor]) -> None:
        with torch.set_grad_enabled(learns):
            out = call()
            if learns:
                out.sum().backward()

    for call in calls.values():
        run(call)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order if turn % 2 else reversed(order):
            dist.barrier()
            start = time.process_time()
            run(calls[name])
            taken[name].append(time.process_time() - start)
    return taken


def looking_rows(ranks: list[Taken]) -> list[dict[str, Any]]:
    """Medians over the rounds, with their intervals."""
    rows = []
    for tokens, method, kind in ranks[0]:
        each = [taken[tokens, method, kind] for taken in ranks]
        plain, look, again = ([sum(s) for s in zip(*(e[run] for e in each), strict=True)]
                              for run in RUNS)  # fmt: skip
        ratio, low, high = middle([a / b for a, b in zip(look, plain, strict=True)])
        control, *around = middle([a / b for a, b in zip(again, plain, strict=True)])
        rows.append(
            {
                "tokens": tokens,
                "method": method,
                "pass": kind,
                "rounds": len(plain),
                "attention CPU ms": middle(plain)[0] * 1e3,
                "trace / attention": ratio,
                "95 %": f"{low:.3f} to {high:.3f}",
                "attention / itself": control,
                "its 95 %": f"{around[0]:.3f} to {around[1]:.3f}",
                f"at most {BAR}": "shown" if high <= BAR else "not" if low > BAR else "open",
            }
        )
    return rows
