"""Runs measured side by side, and what was measured, on what, and how, as a page of results."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import regard

RESULTS = Path(__file__).parent / "results"


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, taken in turns so that a slow moment hits all alike."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def ratios(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """Milliseconds of the first run, and how many times as long the others take: in each of three
    rounds the median over turns; of the rounds their mean and the worst."""
    rounds = [interleaved(runs, repeats) for _ in range(3)]
    first, *others = runs
    found: dict[str, Any] = {f"{first} ms": statistics.mean(r[first] for r in rounds) * 1e3}
    for name in others:
        times = [r[name] / r[first] for r in rounds]
        found[f"{name}: mean"] = statistics.mean(times)
        found[f"{name}: worst"] = max(times)
    return found


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and an interval that covers the true one in 95 of 100 cases or more, whatever the
    values are like: from order statistics, or the extremes where there are too few for that."""
    ordered, n = sorted(values), len(values)
    cut, below = 0, 0.5**n
    while 2 * below <= 0.05:
        cut += 1
        below += math.comb(n, cut) * 0.5**n
    cut = max(cut - 1, 0)
    return statistics.median(ordered), ordered[cut], ordered[n - 1 - cut]


def command() -> str:
    """How this program was started."""
    module = sys.modules["__main__"].__spec__
    started = f"-m {module.name}" if module else sys.argv[0]
    return " ".join(["python", started, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """What was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regard": regard.__version__,
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def write(
    name: str,
    tables: Mapping[str, list[dict[str, Any]]],
    more: Mapping[str, Any] | None = None,
    folder: Path | None = RESULTS,
) -> None:
    """Print tables, and keep them as JSON and Markdown in a folder if there is one.

    `more` is said beside the machine."""
    about = machine() | dict(more or {})
    lines = [f"# {name}", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    for title, rows in tables.items():
        lines += ["", f"## {title}", ""]
        # A peer that refuses a call is missing there.
        heads = list(dict.fromkeys(head for row in rows for head in row))
        lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += ["| " + " | ".join(_cell(row.get(h)) for h in heads) + " |" for row in rows]
    text = "\n".join(lines) + "\n"
    print(text)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps({"machine": about, "tables": tables}, indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(record + "\n")
        (folder / f"{name}.md").write_text(text)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
