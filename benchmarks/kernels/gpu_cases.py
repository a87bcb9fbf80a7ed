"""What is measured on a GPU beside the grid: one function a question, each with its tables and its
bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.kernels.gpu_setup import Setup, assert_finite, ours
from regard import masks

Row = dict[str, Any]
COST = "statistics cost %"
TOKENS = 16384
"""Tokens of a batch: with 16 heads of width 128 or 32 of width 64 they fill the card."""


@dataclass(frozen=True)
class Bar:
    """A number to reach, and what was reached: at least, or at most. The worst case counts."""

    what: str
    reached: list[float | None]
    bar: float
    at_most: bool = False

    def row(self) -> Row:
        known = [x for x in self.reached if x is not None]
        worst = (max if self.at_most else min)(known) if known else None
        met = worst is not None and (worst <= self.bar if self.at_most else worst >= self.bar)
        missing = len(self.reached) - len(known)
        return {
            "what": self.what,
            "reached": worst,
            "bar": f"{'≤' if self.at_most else '≥'} {self.bar:g}",
            "met": "NO" if known and not met else f"{missing} not measured" if missing else "yes",
        }


@dataclass
class Found:
    tables: dict[str, list[Row]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)


def shapes(lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int, bool]]:
    for width in (128, 64):
        for n in lengths:
            for causal in (False, True):
                yield width, 2048 // width, n, causal


def flops(setup: Setup, heads: int, width: int, n: int, causal: bool) -> float:
    batch, n = TOKENS // n, setup.length(n)
    pairs = n * (n + 1) / 2 if causal else n * n
    return 4.0 * batch * setup.heads(heads) * width * pairs


def kind(causal: bool) -> str:
    return "causal" if causal else "full"


def statistics(setup: Setup) -> Found:
    """What row statistics cost a kernel, by the device's own clock."""
    rows = []
    for width, heads, n, causal in shapes((2048, 4096, 16384)):
        q, k, v = setup.tensors(TOKENS // n, setup.heads(heads), setup.length(n), width)
        times = setup.medians(ours(q, k, v, masks.causal() if causal else None))
        work = flops(setup, heads, width, n, causal)
        rows.append(
            {"d": width, "n": n, "mask": kind(causal)}
            | {f"{name} TFLOP/s": work / t / 1e9 for name, t in times.items()}
            | {COST: 100 * (times["trace"] / times["no statistics"] - 1)}
        )
    long = [row[COST] for row in rows if row["n"] >= 4096]
    return Found(
        {"Forward, bf16, 16 heads of width 128 or 32 of width 64, 16384 tokens": rows},
        [Bar(f"{COST}, n ≥ 4096", long, 6, at_most=True)],
    )


def million(setup: Setup) -> Found:
    n = 1 << 20
    q, k, v = setup.tensors(1, 1, setup.length(n) // (16 if setup.tiny else 1), 128)

    def trace() -> regard.Trace:
        return regard.trace(q, k, v, mask=masks.causal(), backend="triton")

    t = trace()
    assert_finite("trace of a million", tuple(t.rows))
    assert_finite("map of a million", t.map(1024))
    seconds = {
        "trace": setup.milliseconds(trace) / 1e3,
        "map(1024)": setup.milliseconds(lambda: t.map(1024)) / 1e3,
    }
    return Found(
        {"1,048,576 tokens, one causal head of width 128": [seconds]},
        [
            Bar("trace of 1M tokens, s", [seconds["trace"]], 0.7, at_most=True),
            Bar("map(1024) of 1M tokens, s", [seconds["map(1024)"]], 0.7, at_most=True),
        ],
    )


def eager(setup: Setup) -> Found:
    n = setup.length(16384)
    q, k, v = setup.tensors(1, setup.heads(16), n, 128)
    hidden = torch.ones(n, n, dtype=torch.bool, device=setup.device).triu_(1)

    def weights() -> tuple[Tensor, Tensor]:
        s = (q @ k.mT * 128**-0.5).masked_fill(hidden, -math.inf)
        p = torch.softmax(s, -1, dtype=torch.float32).to(q.dtype)
        return p @ v, p

    def traced() -> regard.Trace:
        return regard.trace(q, k, v, mask=masks.causal(), backend="triton")

    def asked() -> Tensor:
        return traced().received()

    runs = {"eager": weights, "trace": lambda: tuple(traced().rows), "and received()": asked}
    taken = setup.medians(runs)
    memory = "peak GiB beside inputs"
    rows = [
        {"": name, "ms": taken[name], memory: setup.peak(run) / 2**30} for name, run in runs.items()
    ]
    slow, fast, _ = rows
    less = slow[memory] / fast[memory] if fast[memory] else None
    return Found(
        {"Output with weights to ask for, 16k tokens, 16 causal heads of width 128": rows},
        [
            Bar("times as fast as eager with weights", [slow["ms"] / fast["ms"]], 25),
            Bar("times less memory than eager with weights", [less], 100),
        ],
    )


def ranking(setup: Setup) -> Found:
    """Whether keys come in the same order as in float64, for even and for sharp weights."""
    n, heads, rows = setup.length(4096), 4, []
    for sharpness in (1.0, 3.0):
        for causal in (False, True):
            q, k, v = setup.tensors(1, heads, n, 128)
            q = q * sharpness
            mask = masks.causal() if causal else None
            got = regard.trace(q, k, v, mask=mask, backend="triton").received()[0]
            exact = _received(q[0], k[0], causal=causal)
            first = min(64, n // 2)
            agree = [_agreement(a, b, first) for a, b in zip(got, exact, strict=True)]
            rows.append(
                {
                    "logits × ": sharpness,
                    "mask": kind(causal),
                    "Spearman, least of 4 heads": min(rho for rho, _ in agree),
                    "of the 64 strongest keys in both, least": min(both for _, both in agree),
                }
            )
    return Found({"Keys ranked by received(), bf16 against float64, 4096 tokens": rows})


def _received(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Column sums of the weights in float64, a few rows at a time."""
    q, k = q.double(), k.double()
    place = torch.arange(k.shape[1], device=k.device)
    total = torch.zeros(k.shape[:2], dtype=torch.float64, device=k.device)
    for start in range(0, q.shape[1], 512):
        rows = q[:, start : start + 512]
        s = rows @ k.mT * k.shape[2] ** -0.5
        if causal:
            last = start + torch.arange(rows.shape[1], device=k.device)
            s = s.masked_fill(place > last[:, None], -math.inf)
        total += torch.softmax(s, -1).sum(-2)
    return total


def _agreement(got: Tensor, exact: Tensor, first: int) -> tuple[float, float]:
    """Spearman's rank correlation, and the share of the strongest that both agree on."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (got.double(), exact)])
    both = set(got.topk(first).indices.tolist()) & set(exact.topk(first).indices.tolist())
    return float(torch.corrcoef(ranks)[0, 1]), len(both) / first


GROUPS: dict[str, Callable[[Setup], Found]] = {
    "statistics": statistics,
    "million": million,
    "eager": eager,
    "ranking": ranking,
}
