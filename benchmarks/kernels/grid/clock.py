"""Milliseconds as a user's clock shows them: of one call between two synchronisations.

Host time counts, then, as it does for who waits for one call. What does not count: compiling, the
words that choose a kernel of PyTorch (said before the clock starts), and what an earlier call left
in the card's cache, which is overwritten before each call. All runs of a case take turns, so that a
card that grows hot does so for all, each time in another order: who comes after a long wait finds
the host's caches cold. Of the turns the median is told.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM, FEWEST, MOST, CASE_MS = 2, 7, 31, 60
"""Turns that do not count; those that do, at least and at most; the time that more of them fill."""
CACHE = 256 << 20
"""Bytes that are overwritten before each call: more than a card's cache holds."""


@dataclass(frozen=True)
class Run:
    """One way to run a call."""

    name: str
    forward: Callable[[], Any]
    kernel: SDPBackend | None = None
    """Of PyTorch, where the call is of scaled_dot_product_attention."""
    back: Callable[[Any], Any] | None = None
    """From the answer to gradients, where they are asked for."""

    def call(self) -> Any:
        answer = self.forward()
        return answer if self.back is None else self.back(answer)

    def chosen(self) -> AbstractContextManager[None]:
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)

    def __call__(self) -> Any:
        with self.chosen():
            return self.call()


def in_turns(runs: Iterable[Run], device: str) -> dict[str, float]:
    """Median milliseconds of each run."""
    runs = list(runs)
    cuda = device == "cuda"
    cache = torch.empty(CACHE if cuda else 1, dtype=torch.int8, device=device)
    wait = torch.cuda.synchronize if cuda else _nothing

    def turn(number: int) -> list[float]:
        taken = [0.0] * len(runs)
        order = [(i + number) % len(runs) for i in range(len(runs))]
        for i in order if number % 2 else reversed(order):
            run = runs[i]
            cache.zero_()
            with run.chosen():
                wait()
                start = time.perf_counter()
                answer = run.call()
                wait()
                taken[i] = (time.perf_counter() - start) * 1e3
            # Its memory goes back outside of anybody's time.
            del answer
        return taken

    for number in range(WARM):
        last = turn(number)
    many = min(MOST, max(FEWEST, int(CASE_MS / max(sum(last), 1e-3)))) if cuda else 1
    turns = [turn(number) for number in range(many)]
    return {
        run.name: statistics.median(taken)
        for run, taken in zip(runs, zip(*turns, strict=True), strict=True)
    }


def _nothing() -> None:
    pass
