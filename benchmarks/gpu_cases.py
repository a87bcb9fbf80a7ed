"""What is measured on a GPU: one function a question, each with its tables and its bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_peers import PEERS, Setup, assert_finite, flex, ours, pytorch, with_gradients
from torch import Tensor

import regard
from regard import masks

Row = dict[str, Any]
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


def ratio(times: dict[str, float], peer: str, mine: str) -> float | None:
    """How many times as fast as a peer; None if the peer does not take the case."""
    return times[peer] / times[mine] if peer in times else None


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


def forward(setup: Setup) -> Found:
    rows = []
    for width, heads, n, causal in shapes((2048, 4096, 16384)):
        q, k, v = setup.tensors(TOKENS // n, setup.heads(heads), setup.length(n), width)
        mask = masks.causal() if causal else None
        runs = ours(q, k, v, mask) | pytorch(q, k, v, causal=causal) | flex(q, k, v, causal=causal)
        runs["attention()"] = lambda q=q, k=k, v=v, m=mask: regard.attention(q, k, v, mask=m)
        times = setup.medians(f"forward d{width} {n} {kind(causal)}", runs)
        work = flops(setup, heads, width, n, causal)
        best = min(t for name, t in times.items() if name != "attention()")
        rows.append(
            {"d": width, "n": n, "mask": kind(causal)}
            | {f"{name} TFLOP/s": _rate(work, times, name) for name in ("trace", *PEERS)}
            | {
                "trace / cuDNN": ratio(times, "cuDNN", "trace"),
                "trace / Flex": ratio(times, "FlexAttention", "trace"),
                "statistics cost %": 100 * (times["trace"] / times["no statistics"] - 1),
                "attention() / best": best / times["attention()"],
            }
        )

    def at(column: str, **wanted: Any) -> list[float | None]:
        return [r[column] for r in rows if all(r[key] == x for key, x in wanted.items())]

    long = [r for r in rows if r["n"] >= 4096]
    cudnn = "trace / cuDNN"
    return Found(
        {"Forward, bf16, 16 heads of width 128 or 32 of width 64, 16384 tokens": rows},
        [
            Bar("trace / FlexAttention, n ≥ 4096", [r["trace / Flex"] for r in long], 1.1),
            Bar("trace / cuDNN, d128 16k full", at(cudnn, d=128, n=16384, mask="full"), 0.85),
            Bar("trace / cuDNN, d128 16k causal", at(cudnn, d=128, n=16384, mask="causal"), 0.78),
            Bar("trace / cuDNN, d64 16k", at(cudnn, d=64, n=16384), 0.8),
            Bar("statistics cost %, n ≥ 4096", [r["statistics cost %"] for r in long], 6, True),
            Bar("attention() / the best kernel", at("attention() / best"), 0.98),
        ],
    )


def _rate(work: float, times: dict[str, float], name: str) -> float | None:
    return work / times[name] / 1e9 if name in times else None


def training(setup: Setup) -> Found:
    rows = []
    for width, heads, n, causal in shapes((4096, 16384)):
        shape = TOKENS // n, setup.heads(heads), setup.length(n), width
        leaves = setup.tensors(*shape, grad=True)
        (pull,) = setup.tensors(*shape, count=1)
        mask = masks.causal() if causal else None
        peers = pytorch(*leaves, causal=causal) | flex(*leaves, causal=causal)
        runs = {"trace": ours(*leaves, mask)["trace"]} | peers
        del runs["FlashAttention-2"]
        runs = {name: with_gradients(run, leaves, pull) for name, run in runs.items()}
        times = setup.medians(f"training d{width} {n} {kind(causal)}", runs)
        work = 3.5 * flops(setup, heads, width, n, causal)
        rows.append(
            {"d": width, "n": n, "mask": kind(causal)}
            | {f"{name} TFLOP/s": _rate(work, times, name) for name in runs}
            | {
                "trace / cuDNN": ratio(times, "cuDNN", "trace"),
                "trace / Flex": ratio(times, "FlexAttention", "trace"),
            }
        )
    return Found(
        {"Forward and backward, the same sizes": rows},
        [
            Bar(
                "trace / FlexAttention, forward and backward",
                [r["trace / Flex"] for r in rows],
                0.9,
            )
        ],
    )


def looking(setup: Setup) -> Found:
    rows = []
    n = 16384
    for causal in (False, True):
        q, k, v = setup.tensors(1, setup.heads(16), setup.length(n), 128)
        t = regard.trace(q, k, v, mask=masks.causal() if causal else None, backend="triton")
        runs = {
            "received()": t.received,
            "map(256)": lambda t=t: t.map(256),
            "top(8)": lambda t=t: t.top(8).values,
            "cuDNN": pytorch(q, k, v, causal=causal)["cuDNN"],
        }
        times = setup.medians(f"looking {kind(causal)}", runs)
        rows += [
            {
                "question": name,
                "mask": kind(causal),
                "ms": times[name],
                "of a cuDNN forward": times[name] / times["cuDNN"] if "cuDNN" in times else None,
            }
            for name in times
        ]
    received = [r["of a cuDNN forward"] for r in rows if r["question"] == "received()"]
    return Found(
        {"Looking, 16k tokens, 16 heads of width 128": rows},
        [Bar("received(), of a cuDNN forward", received, 0.6, at_most=True)],
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


def window(setup: Setup) -> Found:
    n, left, width = setup.length(32768), setup.length(1024), 128
    heads = setup.heads(16)
    q, k, v = setup.tensors(1, heads, n, width)
    mask = masks.causal() & masks.window(left)
    runs = ours(q, k, v, mask) | flex(q, k, v, causal=True, window=left)
    times = setup.medians("window", runs)
    pairs = n * (left + 1) - left * (left + 1) / 2
    rates = {name: _rate(4.0 * heads * width * pairs, times, name) for name in times}
    faster = ratio(times, "FlexAttention", "trace")
    row = {f"{name} useful TFLOP/s": x for name, x in rates.items()} | {"trace / Flex": faster}
    return Found(
        {"Causal window of 1024 keys, 32k tokens, 16 heads of width 128": [row]},
        [Bar("trace / FlexAttention, window", [faster], 1.0)],
    )


def decode(setup: Setup) -> Found:
    batch, heads, groups, width = setup.heads(32), 32, 8, 128
    (q,) = setup.tensors(batch, heads, 1, width, count=1)
    k, v = setup.tensors(batch, groups, setup.length(16384), width, count=2)
    runs = ours(q, k, v, None) | pytorch(q, k, v) | flex(q, k, v)
    runs["attention()"] = lambda: regard.attention(q, k, v)
    times = setup.medians("decode", runs)
    moved = (2 * k.numel() + 2 * q.numel()) * 2
    row: Row = {f"{name} GB/s": moved / t / 1e6 for name, t in times.items()}
    row["trace / cuDNN"] = ratio(times, "cuDNN", "trace")
    best = min(t for name, t in times.items() if name != "attention()")
    row["attention() / best"] = best / times["attention()"]
    return Found(
        {"Decoding: batch 32, one query of 32 heads, 16k keys of 8 heads of width 128": [row]},
        [
            Bar("trace / cuDNN, decoding", [row["trace / cuDNN"]], 0.7),
            Bar("attention() / the best kernel, decoding", [row["attention() / best"]], 0.98),
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
    taken = setup.medians("16k tokens, with weights", runs)
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
    "forward": forward,
    "training": training,
    "looking": looking,
    "million": million,
    "window": window,
    "decode": decode,
    "eager": eager,
    "ranking": ranking,
}
