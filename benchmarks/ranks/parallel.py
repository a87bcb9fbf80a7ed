"""Ranks: what looking costs where they share a call, what a monitor's collectives cost, and what a
cost model predicts for 64 ranks.

PYTHONPATH=src python -m benchmarks.ranks.parallel [--quick]

Measured with gloo on the processes of one machine. What is predicted is said to be: from bytes that
the plan of a call counts, and from the rates that are stated, which were not measured here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

import regard
from benchmarks.measurement import write
from benchmarks.models.written_model import Written
from benchmarks.ranks.parallel_model import COLUMNS, RATES, monitor_rows, scaling_rows
from benchmarks.ranks.parallel_traces import BAR, HEADS, WIDTH, Looking, looking_rows
from regard.monitoring.ranks import Ranks


def bandwidth(size: int = 1 << 24) -> dict[str, float]:
    """Bytes a second that a rank sends to the next, while it gets as many."""
    sent, got = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    rank, W = dist.get_rank(), dist.get_world_size()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (rank + 1) % W),
                dist.P2POp(dist.irecv, got, (rank - 1) % W),
            ]
        ):
            work.wait()
        taken.append(time.perf_counter() - start)
    return {"bytes a second": size / statistics.median(taken)}


def monitored(every: int, window: int = 8) -> dict[str, float]:
    """The share of training that is spent in what the ranks of a monitor tell each other, if they
    do so once in `every` steps; more often here, to see it more than once. Each step sums gradients
    over the ranks, as data parallelism does."""
    torch.manual_seed(0)
    model = Written(4, 64, 4, 64)
    ids = torch.randint(1024, (2, 64))
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    monitor = regard.Monitor(model, every=window, rules=())
    told: list[float] = []
    together = Ranks.together

    def timed(self: Ranks, own: Any) -> Any:
        start = time.perf_counter()
        found = together(self, own)
        told.append(time.perf_counter() - start)
        return found

    Ranks.together = timed  # type: ignore[method-assign]

    def train() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(part.view_as(g))
        optimiser.step()
        optimiser.zero_grad()
        monitor.step()

    # The first window also tells who holds what.
    for _ in range(window):
        train()
    told.clear()
    start = time.perf_counter()
    for _ in range(2 * window):
        train()
    step = (time.perf_counter() - start - sum(told)) / (2 * window)
    report = statistics.mean(told)
    return {
        "step ms": step * 1e3,
        "collectives of a window ms": report * 1e3,
        "share of all steps": report / (every * step + report),
    }


def _rank(rank: int, ranks: int, run: Callable[[], Any], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks
    )
    torch.save(run(), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, run: Callable[[], Any]) -> list[Any]:
    """What each of some gloo processes of this machine found."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, run, folder), ranks)
        return [torch.load(Path(folder) / f"{r}.pt") for r in range(ranks)]


class Monitored:
    def __init__(self, quick: bool) -> None:
        self.every = 2 if quick else 50

    def __call__(self) -> dict[str, float]:
        return monitored(self.every)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short and not kept")
    options = parser.parse_args()
    costs = looking_rows(on_ranks(2, Looking(options.quick)))
    links = [found["bytes a second"] for found in on_ranks(2, bandwidth)]
    shares = on_ranks(8, Monitored(options.quick))
    told = [share["share of all steps"] for share in shares]
    ratio = [row["trace / attention"] for row in costs]
    tables = {
        "Measured: parallel.trace beside parallel.attention, 2 gloo ranks, CPU time": costs,
        "Measured: over all of these": [
            {
                "mean ratio": statistics.mean(ratio),
                "worst ratio": max(ratio),
                "bar": BAR,
                "a gloo rank sends GB/s": statistics.mean(links) / 1e9,
            }
        ],
        "Measured: a monitor's collectives, 8 gloo ranks, a report each "
        f"{Monitored(options.quick).every} steps": [
            {
                "step ms": statistics.mean(share["step ms"] for share in shares),
                "a window ms": statistics.mean(s["collectives of a window ms"] for s in shares),
                "mean share": statistics.mean(told),
                "worst share": max(told),
                "bar": 0.01,
            }
        ],
        f"Predicted, not measured: a layer on up to 64 ranks, {COLUMNS}": scaling_rows(
            (1 << 17,) if options.quick else (1 << 17, 1 << 20)
        ),
        "Predicted, not measured: a monitor's collectives, 32 layers of 32 heads": monitor_rows(),
    }
    about = {
        "measured": f"{HEADS} heads of width {WIDTH}, float32, causal, zigzag; processes of one "
        f"thread on one machine with {os.cpu_count()} cores that had other work: times are upper "
        "bounds",
        "predicted": f"from the bytes that plans count and these rates, assumed and not measured: "
        f"{RATES}",
    }
    write("parallel", tables, about, **({"folder": None} if options.quick else {}))


if __name__ == "__main__":
    main()
