"""Is regard right on this GPU, and what do statistics, a million tokens and weights cost there?

Checks first. How fast calls are beside those of others is measured by gpu_grid.py.

PYTHONPATH=src python -m benchmarks.kernels.gpu [--only statistics,million] [--out FOLDER] [--tune]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import gpu_checks
from benchmarks.kernels.gpu_cases import GROUPS, Found
from benchmarks.kernels.gpu_setup import Setup
from benchmarks.measurement import RESULTS, write


def main() -> int:
    options = arguments().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cpu" and not (interpreted and (options.smoke or options.sanitized)):
        sys.exit("no CUDA GPU here; with TRITON_INTERPRET=1 --smoke shows that the script works")
    if options.sanitized:
        if options.sanitized == "racecheck":
            gpu_checks.without_hopper()
        gpu_checks.sanitized_case(device)
        return 0
    if options.warm:
        if options.warm.startswith("tune:"):
            from benchmarks.kernels.gpu_tuning import compile_class

            compile_class(options.warm.removeprefix("tune:"))
        else:
            GROUPS[options.warm](Setup(once=True))
        return 0
    if options.tune is not None:
        from benchmarks.kernels.gpu_tuning import tune

        tune(options.tune, options.processes)
        return 0
    groups = options.only or list(GROUPS)
    if options.smoke:
        measure(groups, Setup(once=True, tiny=True, device=device), {"checks": "a trial"}, None)
        return 0
    about = versions(options.commit)
    if options.skip_checks:
        about["checks"] = "not run in this run"
    else:
        print("checking", flush=True)
        # What takes long to run compiles little: nothing is won by running it ahead.
        ahead = [group for group in groups if group != "eager"]
        outcomes = gpu_checks.check_all(options.processes, ahead, options.patience)
        for outcome in outcomes:
            print(f"{outcome.name}: {outcome.said}", flush=True)
            about[outcome.name] = outcome.said
        if any(outcome.red for outcome in outcomes):
            print("not measured: the checks are not green")
            return 1
    # A part of the table, or one without checks, must not replace the whole.
    whole = not options.skip_checks and not options.only
    measure(groups, Setup(), about, options.out or (RESULTS if whole else None))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", type=_groups, metavar="NAME[,NAME]", help=f"of {', '.join(GROUPS)}"
    )
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    parser.add_argument("--skip-checks", action="store_true", help="results are not kept")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    parser.add_argument(
        "--patience", type=float, default=gpu_checks.PATIENCE, help="seconds that a check may take"
    )
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument(
        "--tune", nargs="?", const="forward,backward,looking", help="sweep settings of kernels"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, once, unchecked, any device")
    parser.add_argument("--sanitized", metavar="TOOL", help=argparse.SUPPRESS)
    parser.add_argument("--warm", metavar="GROUP", help=argparse.SUPPRESS)
    return parser


def _groups(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    return names


def measure(groups: list[str], setup: Setup, about: dict[str, Any], folder: Path | None) -> None:
    """Run groups one after the other, print and keep what they found."""
    every = Found()
    for name in groups:
        start = time.perf_counter()
        found = GROUPS[name](setup)
        every.tables |= found.tables
        every.bars += found.bars
        if setup.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    bars = [bar.row() for bar in every.bars]
    tables = ({"Bars": bars} if bars else {}) | every.tables
    write("gpu", tables, about, folder)


def versions(commit: str | None) -> dict[str, Any]:
    import triton

    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": f"{gpu.name}, {gpu.multi_processor_count} multiprocessors",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "commit": commit or _commit(),
        "command": "python -m benchmarks.kernels.gpu",
    }


def _commit() -> str:
    git = ["git", "-C", str(gpu_checks.ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown: no git here"
    if commit.returncode:
        return "unknown: no git repository here"
    return commit.stdout.strip() + (" and changes" if changed.stdout.strip() else "")


if __name__ == "__main__":
    sys.exit(main())
