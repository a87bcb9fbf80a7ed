"""How kernels are measured on a GPU: sizes, tensors, and the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard.backends.triton import Triton
from regard.inputs import AttentionInputs, check

CASE_MS, FEWEST, MOST = 900, 8, 200
"""How long a case is measured, in how many turns of all runs at least and at most."""
CACHE = 256 << 20
"""Bytes that are overwritten before each call: more than a card's cache holds."""

Run = Callable[[], Any]


@dataclass
class Setup:
    """How cases are run: measured; once each, to compile; or once and tiny, to try the script."""

    once: bool = False
    tiny: bool = False
    device: str = "cuda"

    def __post_init__(self) -> None:
        self.source = torch.Generator(self.device).manual_seed(0)

    def length(self, n: int) -> int:
        return max(16, n // 128) if self.tiny else n

    def heads(self, n: int) -> int:
        return max(1, n // 8) if self.tiny else n

    def tensors(self, *shape: int, count: int = 3) -> list[Tensor]:
        how: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        how["generator"] = self.source
        return [torch.randn(*shape, **how) for _ in range(count)]

    def medians(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """Median milliseconds of each run, taken in turns."""
        for name, run in runs.items():
            assert_finite(name, run())
        if self.once:
            return {name: self.milliseconds(run) for name, run in runs.items()}
        return in_turns(runs)

    def milliseconds(self, run: Run, repeats: int = 3) -> float:
        """The median of a few runs, for those that take long."""
        taken = []
        for _ in range(1 if self.once else repeats):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            taken.append((time.perf_counter() - start) * 1e3)
        return statistics.median(taken)

    def peak(self, run: Run) -> int:
        """Bytes held at most while running, beside what is held already."""
        if self.device != "cuda":
            run()
            return 0
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def in_turns(runs: Mapping[str, Run]) -> dict[str, float]:
    """Median milliseconds of single calls with a cold cache, one of each run in every turn: a card
    that grows hot and slow in between does so for all of them."""
    cache = torch.empty(CACHE, dtype=torch.int8, device="cuda")

    def turn() -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        marks = {}
        for name, run in runs.items():
            cache.zero_()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            marks[name] = before, after
        return marks

    turn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    turn()
    torch.cuda.synchronize()
    took = (time.perf_counter() - start) * 1e3
    turns = [turn() for _ in range(min(MOST, max(FEWEST, int(CASE_MS / took))))]
    torch.cuda.synchronize()
    return {
        name: statistics.median(
            before.elapsed_time(after) for before, after in (marks[name] for marks in turns)
        )
        for name in runs
    }


def assert_finite(what: str, answer: Any) -> None:
    """No number is reported for a kernel that gives NaN."""
    for tensor in _tensors(answer):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise AssertionError(f"{what}: NaN or infinity in the answer")


def _tensors(answer: Any) -> Iterable[Tensor]:
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, tuple):
        for part in answer:
            yield from _tensors(part)


def checked(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> AttentionInputs:
    """A call checked beforehand, so that only kernels are measured."""
    return check(
        q, k, v, mask=mask, score=None, bias=None, softcap=None, sink=None, scale=None, dropout=0.0,
        training=False,
    )  # fmt: skip


def ours(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> dict[str, Run]:
    from regard.backends.triton.forward import run
    from regard.backends.triton.settings.tuning import forward_settings

    inputs, kernels = checked(q, k, v, mask), Triton()
    same = forward_settings(inputs, statistics=True)
    return {
        "trace": lambda: kernels.observe(inputs),
        "no statistics": lambda: run(inputs, same, statistics=False)[0],
    }
