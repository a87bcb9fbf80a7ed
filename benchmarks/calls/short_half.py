"""Short texts in half precision on a CPU, where the time around a call counts: attention() and
trace() beside PyTorch's own, in turns, with two threads and with one.

PYTHONPATH=src python -m benchmarks.calls.short_half [--out FOLDER]

The process is bound to two cores. For CPUs with instructions for half precision (AMX): without
them PyTorch's kernel takes many times as long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks.measurement import RESULTS, write
from regard import masks

TYPES, WIDTHS, LENGTHS = (torch.bfloat16, torch.float16), (64, 128), (64, 128, 256)
SECONDS, TURNS = 0.4, 400
"""How long each row is measured, and how many turns are enough."""
CAUSAL = masks.causal()


def two_cores() -> list[int]:
    """Two CPUs of different cores, of those that this process may use."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(found.values())[:2]


def qkv(dtype: torch.dtype, n: int, width: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(1, 8, n, width, generator=source).to(dtype) for _ in range(3)]


def check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    """Against float64: the first call of a kind, and those after it."""
    mask = CAUSAL if causal else None
    want = regard.trace(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    for _ in range(4):
        found = regard.trace(q, k, v, mask=mask)
        for out in (found.out, regard.attention(q, k, v, mask=mask)):
            assert (out.double() - want.out).abs().max() < 2**-6 * want.out.abs().max()
        assert (found.lse.double() - want.lse).abs().max() < 1e-4
        assert (found.entropy.double() - want.entropy).abs().max() < 1e-3


def in_turns(runs: Mapping[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Of each run the median and the least, in µs."""
    for run in [*runs.values()] * 3:
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + SECONDS
    for turn in range(TURNS):
        for name, run in runs.items():
            start = time.perf_counter_ns()
            run()
            taken[name].append((time.perf_counter_ns() - start) / 1e3)
        if turn > 1 and time.perf_counter() > end:
            break
    return {name: (statistics.median(t), min(t)) for name, t in taken.items()}


def row(dtype: torch.dtype, n: int, width: int, *, causal: bool) -> dict[str, Any]:
    q, k, v = qkv(dtype, n, width)
    check(q, k, v, causal=causal)
    mask = CAUSAL if causal else None

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    found = in_turns(
        {
            "sdpa": sdpa,
            "again": sdpa,
            "attention": lambda: regard.attention(q, k, v, mask=mask),
            "trace": lambda: regard.trace(q, k, v, mask=mask),
        }
    )
    (theirs, least), (_, again) = found["sdpa"], found["again"]
    what = {"n": n, "width": width, "causal": causal, "sdpa µs": theirs}
    for name in ("attention", "trace"):
        middle, quickest = found[name]
        what[f"{name}() / sdpa"] = theirs / middle
        what[f"{name}() / sdpa, least times"] = min(least, again) / quickest
    return what


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    os.sched_setaffinity(0, two_cores())
    tables = {}
    for threads in (2, 1):
        torch.set_num_threads(threads)
        for dtype in TYPES:
            title = f"{str(dtype).removeprefix('torch.')}, 8 heads, {threads} threads"
            tables[title] = [
                row(dtype, n, width, causal=causal)
                for width in WIDTHS
                for n in LENGTHS
                for causal in (False, True)
            ]
    write("cpu_half_short", tables, folder=options.out)


if __name__ == "__main__":
    main()
