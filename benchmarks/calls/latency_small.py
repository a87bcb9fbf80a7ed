"""Small calls, in which Python is what takes the time: plain and compiled, beside PyTorch's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks

Run = Callable[[], Any]
CAUSAL = masks.causal()
SHAPES = {"cuda": ((1, 8, 128, 64), (4, 16, 128, 128)), "cpu": ((1, 1, 4, 8),)}
QUEUED = 64
"""Calls that are made without waiting. With a few kernels each they fit a card's queue, so that
what is measured is how fast Python makes them."""


def qkv(shape: tuple[int, ...], device: str, *, learned: bool = False) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        torch.randn(*shape, generator=source).to(device, dtype).requires_grad_(learned)
        for _ in range(3)
    ]


Call = Callable[..., Any]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attention(q, k, v)


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attention(q, k, v, mask=CAUSAL)


def look(q: Tensor, k: Tensor, v: Tensor) -> regard.Trace:
    return regard.trace(q, k, v)


def look_causally(q: Tensor, k: Tensor, v: Tensor) -> regard.Trace:
    return regard.trace(q, k, v, mask=CAUSAL)


OURS: dict[str, tuple[Call, bool, bool]] = {
    "attention": (attend, False, False),
    "attention, causal": (attend_causally, True, False),
    "trace": (look, False, False),
    "trace, causal": (look_causally, True, False),
    "attention, causal, requires_grad": (attend_causally, True, True),
    "trace, causal, requires_grad": (look_causally, True, True),
}
"""What is called, whether it is causal, and whether gradients are wanted."""


def as_tensors(call: Call) -> Call:
    """A call that gives what a graph can give."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        answer = call(q, k, v)
        if isinstance(answer, Tensor):
            return (answer,)
        return answer.out, answer.lse, answer.entropy

    return run


def cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, is_causal=causal)


def peers(three: list[Tensor], *, causal: bool) -> dict[str, Run]:
    found: dict[str, Run] = {
        "SDPA": lambda: sdpa(*three, is_causal=causal),
        "SDPA again": lambda: sdpa(*three, is_causal=causal),
    }
    if three[0].device.type == "cuda":
        found["cuDNN"] = lambda: cudnn(*three, causal=causal)
    return found


class ByHand(nn.Module):
    """The projections of a module of ours, around PyTorch's attention."""

    def __init__(self, ours: regard.nn.MultiHeadAttention) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        m = self.ours
        parts = (project(x) for project in (m.q_proj, m.k_proj, m.v_proj))
        q, k, v = (part.unflatten(-1, (m.heads, -1)).transpose(1, 2) for part in parts)
        y: Tensor = m.out_proj(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


def modules(shape: tuple[int, ...], device: str) -> dict[str, Run]:
    B, H, N, D = shape
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ours = regard.nn.MultiHeadAttention(H * D, H).to(device, dtype).eval()
    by_hand = ByHand(ours)
    x = torch.randn(B, N, H * D).to(device, dtype)
    return {
        "regard": lambda: ours(x, mask=CAUSAL),
        "SDPA": lambda: by_hand(x),
        "SDPA again": lambda: by_hand(x),
    }


def check(three: list[Tensor], out: Tensor, *, causal: bool) -> None:
    """By the formula in float64, and by what it errs in the tensors' own precision."""

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            hidden = torch.ones(q.shape[2], k.shape[2], device=q.device).triu(1).bool()
            logits = logits.masked_fill(hidden, -math.inf)
        return logits.softmax(-1) @ v

    with torch.no_grad():
        truth = formula(*(t.double() for t in three))
        plain = float((formula(*three).double() - truth).norm())
        error = float((out.double() - truth).norm())
    rounding = torch.finfo(out.dtype).eps * float(truth.norm())
    assert error <= 4 * plain + rounding, f"error {error:.3g}, of plain arithmetic {plain:.3g}"


def output(answer: Any) -> Tensor:
    found: Tensor = answer.out if isinstance(answer, regard.Trace) else answer
    return found


def able(runs: dict[str, Run]) -> dict[str, Run]:
    """Without the peer that has no kernel for a call."""
    try:
        runs["cuDNN"]()
    except RuntimeError:
        return {name: run for name, run in runs.items() if name != "cuDNN"}
    except KeyError:
        pass
    return runs


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def back_to_back(runs: Mapping[str, Run], turns: int) -> dict[str, float]:
    """Median microseconds that Python takes for a call, one after the other without waiting for
    the device; in turns, so that a slow moment hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            for _ in range(QUEUED):
                run()
            if turn:
                taken[name].append((time.perf_counter() - start) / QUEUED * 1e6)
    wait()
    return {name: statistics.median(values) for name, values in taken.items()}


def single(runs: Mapping[str, Run], turns: int) -> dict[str, float]:
    """Median microseconds of a call until its answer is there. The same call comes before it, so
    that none pays for whose turn it was."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            run()
            wait()
            start = time.perf_counter()
            run()
            wait()
            if turn:
                taken[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in taken.items()}


def _quiet(learned: bool) -> Any:
    return nullcontext() if learned else torch.no_grad()


def plain_cases(device: str) -> list[tuple[str, tuple[int, ...]]]:
    shapes = SHAPES[device]
    names = [*OURS, "nn.MultiHeadAttention, causal"]
    return [(name, shape) for shape in shapes for name in names]


def plain(name: str, shape: tuple[int, ...], device: str, turns: int) -> dict[str, Any]:
    """A row: what Python takes for a call of ours and for the same of PyTorch."""
    learned = False
    if name in OURS:
        call, causal, learned = OURS[name]
        three = qkv(shape, device, learned=learned)
        runs: dict[str, Run] = {"regard": lambda: call(*three)} | peers(three, causal=causal)
        with _quiet(learned):
            runs = able(runs)
            check(three, output(runs["regard"]()), causal=causal)
    else:
        runs = modules(shape, device)
        with torch.no_grad():
            torch.testing.assert_close(runs["regard"](), runs["SDPA"](), rtol=0.05, atol=0.05)
    with _quiet(learned):
        queued, alone = back_to_back(runs, turns), single(runs, turns * 4)
    row: dict[str, Any] = {"call": name, "shape": str(list(shape))}
    for way, µs in (("back to back", queued), ("single", alone)):
        best = min(value for who, value in µs.items() if who not in ("regard", "SDPA again"))
        row |= {
            f"{way} µs": µs["regard"],
            f"SDPA {way} µs": µs["SDPA"],
            f"cuDNN by name {way} µs": µs.get("cuDNN"),
            f"{way} / best peer": µs["regard"] / best,
            # How far two measurements of one and the same thing are apart.
            f"SDPA / itself, {way}": µs["SDPA"] / µs["SDPA again"],
        }
    return row


MODES = {"fullgraph": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
COMPILED = ("attention", "attention, causal", "trace", "trace, causal")


def compiled_cases(device: str) -> list[tuple[str, str, tuple[int, ...]]]:
    modes = MODES if device == "cuda" else ("fullgraph",)
    return [(mode, name, shape) for shape in SHAPES[device] for mode in modes for name in COMPILED]


def compiled(
    mode: str, name: str, shape: tuple[int, ...], device: str, turns: int
) -> dict[str, Any]:
    """A row: a call compiled, beside itself plain and beside PyTorch's compiled alike."""
    torch.compiler.reset()
    call, causal, _ = OURS[name]
    call, three = as_tensors(call), qkv(shape, device)
    ours = torch.compile(call, fullgraph=True, **MODES[mode])
    theirs = torch.compile(
        lambda q, k, v: sdpa(q, k, v, is_causal=causal), fullgraph=True, **MODES[mode]
    )

    def stepwise(run: Call) -> Run:
        def once() -> Any:
            # What the graph of the step before gave may be written over.
            torch.compiler.cudagraph_mark_step_begin()
            return run(*three)

        return once

    runs: dict[str, Run] = {
        "plain": lambda: call(*three),
        "compiled": stepwise(ours),
        "SDPA compiled": stepwise(theirs),
    }
    with torch.no_grad():
        for _ in range(3):
            # A graph is recorded in its second or third run.
            check(three, runs["compiled"]()[0], causal=causal)
            runs["SDPA compiled"]()
        queued, alone = back_to_back(runs, turns), single(runs, turns * 4)
    row: dict[str, Any] = {"call": name, "shape": str(list(shape)), "compiled": mode}
    for way, µs in (("back to back", queued), ("single", alone)):
        row |= {
            f"{way} µs": µs["compiled"],
            f"{way}, compiled / plain": µs["compiled"] / µs["plain"],
            f"{way}, compiled / SDPA compiled": µs["compiled"] / µs["SDPA compiled"],
        }
    return row
