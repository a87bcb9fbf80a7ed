"""How long a look takes: from the command to what it shows, and how much of it is importing torch.

The seconds of the CPU depend little on what else the machine does; those of the clock do.

PYTHONPATH=src python -m benchmarks.views.view [--out FOLDER] [--repeats N]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import regard
from benchmarks.measurement import RESULTS, write

SENTENCE = "Once upon a time there was a little girl who loved reading"
RUNS = {
    "python, nothing": ["-c", ""],
    "import torch": ["-c", "import torch"],
    "import regard": ["-c", "import regard"],
    "12 words in the terminal": ["-m", "regard", "view", SENTENCE],
    "12 words as a picture": ["-m", "regard", "view", SENTENCE, "--picture", "{folder}/map.svg"],
    "a file of 6 layers × 8 heads × 12 tokens": ["-m", "regard", "view", "{folder}/run.regard"],
    "one of 12 layers × 12 heads × 2048 tokens": ["-m", "regard", "view", "{folder}/long.regard"],
}


def recorded(path: Path, layers: int, heads: int, tokens: int) -> None:
    """A trace file of random queries and keys."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Attention(heads) for _ in range(layers))
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        for layer in model:
            layer(tokens)
    names = SENTENCE.split() if tokens == 12 else [f"w{place}" for place in range(tokens)]
    seen.save(path, tokens=names)


class Attention(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, n: int) -> torch.Tensor:
        q, k, v = torch.randn(3, 1, self.heads, n, 64)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def seconds(command: list[str]) -> tuple[float, float, str]:
    """By the clock, of the CPU, and what was shown."""
    start, used = time.perf_counter(), _used()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, _used() - used, done.stdout


def _used() -> float:
    of = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of.ru_utime + of.ru_stime


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--out", type=Path, default=RESULTS)
    parse.add_argument("--repeats", type=int, default=5)
    args = parse.parse_args()
    load = os.getloadavg()[0]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        recorded(Path(folder) / "run.regard", 6, 8, 12)
        recorded(Path(folder) / "long.regard", 12, 12, 2048)
        for _ in range(args.repeats + 1):
            for name, command in RUNS.items():
                clock, cpu, out = seconds([part.format(folder=folder) for part in command])
                assert "view" not in command or out, name
                taken[name].append((clock, cpu))
    rows: list[dict[str, Any]] = []
    for name, times in taken.items():
        # The first run fills the disk's cache.
        clock, cpu = zip(*times[1:], strict=True)
        rows.append(
            {
                "run": name,
                "clock s, fastest": min(clock),
                "clock s, median": statistics.median(clock),
                "CPU s, median": statistics.median(cpu),
            }
        )
    more = {"load of the machine before": f"{load:.1f} on {os.cpu_count()} cores"}
    write("view", {"From the command to what it shows": rows}, more, args.out)


if __name__ == "__main__":
    main()
