"""Ranks that share one GPU: are their answers those of one process, and what does looking cost.

PYTHONPATH=src python -m benchmarks.ranks.parallel_gpu [--through gloo|nccl] [--ranks N] [--quick]

Gloo copies CUDA tensors through the CPU; NCCL takes several ranks on one GPU only where its version
allows that. Ranks of one GPU take turns on it, so a call of all of them computes what one process
computes, and what it takes beyond that are the collectives. From the rates measured here a cost
model predicts more ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import regard
from benchmarks.measurement import middle, write
from benchmarks.ranks.parallel_model import COLUMNS, RATES, Rates, scaling_rows
from regard import masks, parallel

METHODS = ("ulysses", "all_gather", "ring")
PASSES = ("forward", "and backward")
HEADS, KEY_HEADS, WIDTH = 16, 8, 128
BAR = 1.05


def drawn(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """The same queries, keys and values on every rank."""
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, tokens, WIDTH, generator=draw).to("cuda", dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def differences(method: str, tokens: int) -> dict[str, float]:
    """How far the ranks' float32 answers are from those of one process, in parts of the largest."""
    whole = [t.requires_grad_() for t in drawn(tokens, torch.float32)]
    layout = parallel.zigzag(tokens, dist.get_world_size())
    mine = [layout.shard(t.detach(), dim=2).requires_grad_() for t in whole]
    told: dict[str, Any] = {"mask": masks.causal()}
    want = regard.trace(*whole, **told)
    got = parallel.trace(*mine, layout=layout, method=method, **told)
    pulled = torch.autograd.grad(want.out.square().sum(), whole)
    shares = torch.autograd.grad(got.out.square().sum(), mine)
    pairs = {
        "out": (got.out, want.out), "lse": (got.lse, want.lse),
        "entropy": (got.entropy, want.entropy), "received": (got.received(), want.received()),
    } | dict(zip(("dq", "dk", "dv"), zip(shares, pulled, strict=True), strict=True))  # fmt: skip
    found = {}
    for name, (ours, theirs) in pairs.items():
        part = theirs if ours.shape == theirs.shape else layout.shard(theirs, dim=2)
        found[name] = float(
            (_local(ours) - part).detach().abs().max() / theirs.detach().abs().max()
        )
    return found


def _local(t: Any) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def ratios(method: str, tokens: int, kind: str, rounds: int) -> dict[str, list[float]]:
    """Wall-clock seconds of attention, trace and attention again, in turns."""
    layout = parallel.zigzag(tokens, dist.get_world_size())
    mine = [
        layout.shard(t, dim=2).contiguous().requires_grad_() for t in drawn(tokens, torch.bfloat16)
    ]
    told: dict[str, Any] = {"layout": layout, "mask": masks.causal(), "method": method}
    calls: dict[str, Callable[[], Tensor]] = {
        "attention": lambda: parallel.attention(*mine, **told),
        "trace": lambda: parallel.trace(*mine, **told).out,
        "again": lambda: parallel.attention(*mine, **told),
    }
    learns = kind != "forward"

    def run(call: Callable[[], Tensor]) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        with torch.set_grad_enabled(learns):
            out = call()
            if learns:
                torch.autograd.grad(_local(out).sum(), mine)
        torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - start

    for call in calls.values():
        run(call)
        run(call)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        order = names[turn % 3 :] + names[: turn % 3]
        for name in order if turn % 2 else reversed(order):
            taken[name].append(run(calls[name]))
    return taken


def alone(tokens: int, kind: str, rounds: int) -> float:
    """Seconds of the whole call in one process, while the other ranks wait."""
    learns = kind != "forward"
    taken = 0.0
    if dist.get_rank() == 0:
        whole = [t.requires_grad_() for t in drawn(tokens, torch.bfloat16)]

        def run() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.set_grad_enabled(learns):
                out = regard.attention(*whole, mask=masks.causal())
                if learns:
                    torch.autograd.grad(out.sum(), whole)
            torch.cuda.synchronize()
            return time.perf_counter() - start

        taken = statistics.median([run() for _ in range(rounds + 3)][3:])
    dist.barrier()
    return taken


def link(rounds: int) -> tuple[float, float]:
    """Bytes a second that a rank sends, and seconds of a message, in the collective that gathers
    keys: from a message of 4 kB and one of 64 MB."""
    ranks = dist.get_world_size()

    def taken(numbers: int) -> float:
        mine = torch.zeros(numbers, dtype=torch.bfloat16, device="cuda")
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        times = []
        for _ in range(rounds + 3):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather(parts, mine)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])

    small, large = taken(1 << 11), taken(1 << 25)
    return (ranks - 1) * 2 * (1 << 25) / (large - small), small


class Measured:
    """What each rank does."""

    def __init__(self, sizes: list[int], rounds: int) -> None:
        self.sizes, self.rounds = sizes, rounds

    def __call__(self) -> dict[str, Any]:
        found: dict[str, Any] = {"right": {}, "taken": {}, "failed": {}, "alone": {}}
        for tokens in self.sizes:
            for kind in PASSES:
                found["alone"][tokens, kind] = alone(tokens, kind, self.rounds)
        found["link"] = link(self.rounds)
        for method in METHODS:
            try:
                found["right"][method] = differences(method, 500)
                for tokens in self.sizes:
                    for kind in PASSES:
                        key = method, tokens, kind
                        found["taken"][key] = ratios(*key, self.rounds)
            except Exception as error:
                found["failed"][method] = f"{type(error).__name__}: {error}"
        return found


def _rank(rank: int, ranks: int, through: str, run: Callable[[], Any], folder: str) -> None:
    torch.cuda.set_device(0)
    place = f"file://{folder}/meeting"
    dist.init_process_group(through, init_method=place, rank=rank, world_size=ranks)
    torch.save(run(), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, through: str, run: Callable[[], Any]) -> list[Any]:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, through, run, folder), ranks)
        return [torch.load(Path(folder) / f"{r}.pt") for r in range(ranks)]


def rates_of(found: dict[str, Any], tokens: int) -> Rates:
    pairs = HEADS * tokens * (tokens + 1) / 2
    bandwidth, latency = found["link"]
    return Rates(4 * WIDTH * pairs / found["alone"][tokens, "forward"], bandwidth, latency)


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for (method, tokens, kind), taken in found["taken"].items():
        plain = taken["attention"]
        ratio, low, high = middle([a / b for a, b in zip(taken["trace"], plain, strict=True)])
        control, *around = middle([a / b for a, b in zip(taken["again"], plain, strict=True)])
        rows.append(
            {
                "tokens": tokens, "method": method, "pass": kind,
                "one process ms": found["alone"][tokens, kind] * 1e3,
                "attention ms": middle(plain)[0] * 1e3,
                "of which collectives": 1 - found["alone"][tokens, kind] / middle(plain)[0],
                "trace / attention": ratio,
                "95 %": f"{low:.3f} to {high:.3f}", "attention / itself": control,
                "its 95 %": f"{around[0]:.3f} to {around[1]:.3f}",
                f"at most {BAR}": "shown" if high <= BAR else "not" if low > BAR else "open",
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--through", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short and not kept")
    parser.add_argument("--out", help="folder for the results")
    options = parser.parse_args()
    sizes, rounds = ([2048], 3) if options.quick else ([8192, 32768], 11)
    each = on_ranks(options.ranks, options.through, Measured(sizes, rounds))
    told = each[0]
    right = [
        {"method": method} | {name: max(e["right"][method][name] for e in each) for name in found}
        for method, found in told["right"].items()
    ]
    costs = rows_of(told)
    tables: dict[str, list[dict[str, Any]]] = {}
    if right:
        tables["Right: largest differences to one process, float32, 500 tokens"] = right
    if costs:
        tables["Wall-clock: parallel.trace beside parallel.attention"] = costs
        ratio = [row["trace / attention"] for row in costs]
        tables["Over all of these"] = [
            {"mean ratio": statistics.mean(ratio), "worst ratio": max(ratio), "bar": BAR}
        ]
    rates = rates_of(told, max(sizes))
    lengths = 131_072, 1_048_576
    tables[f"Predicted for ranks with a GPU each: {rates}, as measured"] = scaling_rows(
        lengths, rates
    )
    faster = replace(RATES, flops=rates.flops)
    tables[f"Predicted with a network that is assumed: {faster}"] = scaling_rows(lengths, faster)
    if told["failed"]:
        tables["What could not run"] = [
            {"method": method, "why": why} for method, why in told["failed"].items()
        ]
    about = {
        "ranks": f"{options.ranks} on one GPU, through {options.through}",
        "measured": f"{HEADS} heads of width {WIDTH} over {KEY_HEADS}, bfloat16, causal, zigzag",
        "rates": f"{rates} (forward, one process; all_gather of {options.through})",
        "predicted": COLUMNS,
    }
    folder = options.out and Path(options.out)
    kept = {"folder": None} if options.quick else {"folder": folder} if folder else {}
    write(f"parallel_{options.through}", tables, about, **kept)


if __name__ == "__main__":
    main()
