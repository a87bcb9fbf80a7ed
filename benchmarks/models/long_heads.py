"""Scores of every head of a 12-layer model that reads one long text on a CPU: time and memory.

PYTHONPATH=src OMP_NUM_THREADS=1 python -m benchmarks.models.long_heads [--quick]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measurement import write
from benchmarks.models.written_model import Written
from regard import interpret

LAYERS, WIDTH, HEADS = 12, 64, 2


def taken(run: Callable[[], object]) -> dict[str, float]:
    """CPU seconds, and the most memory that this process ever had."""
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"CPU s": seconds, "peak MB": most / 1e6}


@torch.no_grad()
def rows(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Short texts first, since a peak stays."""
    found = []
    for tokens in lengths:
        torch.manual_seed(0)
        model = Written(LAYERS, WIDTH, HEADS, tokens).eval()
        ids = torch.randint(1024, (1, tokens))
        told: dict[str, Any] = {"probes": False, "random": False}
        for name, run in {
            "forward": lambda m=model, x=ids: m(x),
            "heads": lambda m=model, x=ids, t=told: interpret.heads(m, [x], **t),
        }.items():
            found.append({"tokens": tokens, "run": name} | taken(run))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short and not kept")
    quick = parser.parse_args().quick
    lengths = (256, 512) if quick else (4096, 8192, 16384)
    title = f"One text, {LAYERS} layers of {HEADS} heads {WIDTH // HEADS} wide, no probes"
    write("long_heads", {title: rows(lengths)}, **({"folder": None} if quick else {}))


if __name__ == "__main__":
    main()
