"""How fast is regard for every call people make: a grid of calls, each beside the best peer.

PYTHONPATH=src python -m benchmarks.kernels.gpu_grid [--patience S] [--only GROUP,…] [--commit HASH]
    [--out FOLDER]

Each case is checked against float64 before it is measured (grid/checks.py); a wrong one is told,
not measured, and ends the script with 1. Times are those of a user's clock, of one call between two
synchronisations (grid/clock.py). A ratio is the time of the best peer by ours: above 1 we are the
faster. Rates count allowed pairs only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import regard
from benchmarks.kernels.gpu import versions
from benchmarks.kernels.gpu_checks import Command, run_all
from benchmarks.kernels.grid import questions
from benchmarks.kernels.grid.cases import GROUPS, Case, in_order, shares
from benchmarks.kernels.grid.checks import Check
from benchmarks.kernels.grid.clock import in_turns
from benchmarks.kernels.grid.peers import Call
from benchmarks.kernels.grid.tables import (
    OF_CUDNN,
    Row,
    peers_of,
    rated,
    summary,
    summary_of_looking,
)
from benchmarks.measurement import RESULTS, command, write

PATIENCE = 420
AHEAD = 0.4
"""Of the patience, the share that compiling ahead may take."""
LOOKING = "looking"


@dataclass
class Found:
    """What was measured, by group, and what was not."""

    times: dict[str, dict[Case, dict[str, float]]] = field(default_factory=dict)
    work: dict[Case, float] = field(default_factory=dict)
    looks: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    too_late: list[str] = field(default_factory=list)

    def tables(self, planned: dict[str, int]) -> dict[str, list[Row]]:
        groups = {name: self._rows(name) for name in planned if self.times.get(name)}
        tables: dict[str, list[Row]] = {}
        if self.wrong:
            tables["Wrong, or failed"] = [{"what": text} for text in self.wrong]
        if groups:
            title = "Summary: time of the best peer / ours; above 1 is faster; geometric means"
            tables[title] = summary(groups, planned)
        if self.looks:
            title = (
                "Summary of looking: in forward passes of cuDNN; smaller is better; geometric means"
            )
            tables[title] = summary_of_looking(self.looks)
        tables |= {name[0].upper() + name[1:]: rows for name, rows in groups.items()}
        if self.looks:
            tables["Looking: in forward passes of cuDNN of the same call; smaller is better"] = (
                self.looks
            )
        if self.too_late:
            tables["Left out: no time"] = [{"case": text} for text in self.too_late]
        if self.refused:
            tables["Left out: peers"] = [{"peer, case and reason": text} for text in self.refused]
        return tables

    def _rows(self, group: str) -> list[Row]:
        measured = self.times[group]
        peers = peers_of(list(measured.values()))
        unit = "GB/s" if group == "decode" else "TFLOP/s"
        # As they are listed, not as they were run.
        return [
            rated(case, measured[case], self.work[case], unit, peers)
            for case in sorted(measured, key=_place(group))
        ]


def _place(group: str) -> Any:
    listed = {str(case): i for i, case in enumerate(GROUPS[group])}
    return lambda case: listed.get(str(case), 0)


def main() -> int:
    start = time.perf_counter()
    options = arguments().parse_args()
    groups = options.only or list(GROUPS)
    cases = list(in_order(groups))
    if options.dry_run:
        for group, case in cases:
            print(f"{group}: {case}")
        print(f"{len(cases)} cases; now tiny ones on the CPU", flush=True)
        found = measure([(group, case.tiny()) for group, case in cases], "cpu", float("inf"))
        return report(found, groups, {}, options.out)
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; --dry-run lists the cases and shows that the script works")
    if options.ahead:
        share, processes = map(int, options.ahead.split("/"))
        compile_ahead(shares(groups, processes)[share], "cuda")
        return 0
    about = versions(options.commit) | {"command": command()}
    warm(groups, options.processes, AHEAD * options.patience)
    found = measure(cases, "cuda", start + options.patience)
    print(f"all of it: {time.perf_counter() - start:.0f} s", flush=True)
    # A part of the table must not replace the whole.
    return report(found, groups, about, options.out or (None if options.only else RESULTS))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--patience", type=float, default=PATIENCE,
        help=f"seconds after which no case is started; default {PATIENCE}",
    )  # fmt: skip
    names = ", ".join(map(_word, GROUPS))
    parser.add_argument("--only", type=_groups, metavar="GROUP[,GROUP]", help=f"of {names}")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--out", type=Path, help="folder for gpu_grid.json and gpu_grid.md")
    parser.add_argument(
        "--processes", type=int, default=min(14, len(os.sched_getaffinity(0))),
        help="that compile ahead; 0 for none",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="list the cases, and run tiny ones on the CPU"
    )
    parser.add_argument("--ahead", metavar="I/N", help=argparse.SUPPRESS)
    return parser


def _word(group: str) -> str:
    """A group's name for the command line."""
    return group.replace(", ", "-").replace(" ", "-")


def _groups(text: str) -> list[str]:
    known = {_word(name): name for name in GROUPS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no group {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in text.split(",")]


def warm(groups: list[str], processes: int, patience: float) -> None:
    """Compile in many processes what one would take long for; kernels are kept on disk."""
    names = ",".join(map(_word, groups))
    this = [sys.executable, "-m", "benchmarks.kernels.gpu_grid", "--only", names]
    commands = [
        Command("compile", [*this, "--ahead", f"{i}/{processes}"]) for i in range(processes)
    ]
    if commands:
        for ended in run_all(commands, processes, patience):
            if ended.code:
                print("\n".join(ended.output.splitlines()[-15:]), flush=True)


def compile_ahead(cases: Iterable[tuple[str, Case]], device: str) -> None:
    for group, case in cases:
        # Whatever fails here fails again, and is told, when it is measured.
        try:
            call = Call.make(case, device)
            for run in [*call.ours(), *call.peers([])]:
                run()
            if group == LOOKING:
                seen = regard.trace(call.q, call.k, call.v, **call.kind.regard)
                for ask in questions.asked_of(seen).values():
                    ask()
        except Exception as error:
            print(f"{case}: {error}", flush=True)
        torch.cuda.empty_cache()


def measure(cases: list[tuple[str, Case]], device: str, until: float) -> Found:
    """Check and measure case after case, until there is no more time."""
    found = Found()
    start = time.perf_counter()
    for i, (group, case) in enumerate(cases, 1):
        if time.perf_counter() > until:
            found.too_late.append(f"{group}: {case}")
            continue
        # A case that fails must not take the others with it.
        try:
            said = (look if group == LOOKING else compare)(found, group, case, device)
        except Exception as error:
            said = f"failed: {type(error).__name__}: {(str(error) or '-').splitlines()[0][:200]}"
            found.wrong.append(f"{group}: {case}: {said}")
        if device == "cuda":
            torch.cuda.empty_cache()
        took = time.perf_counter() - start
        print(f"[{i}/{len(cases)}, {took:.0f} s] {group}: {case}: {said}", flush=True)
    return found


def compare(found: Found, group: str, case: Case, device: str) -> str:
    call = Call.make(case, device)
    ours, check = call.ours(), Check(call)
    problems = [f"{run.name}: {problem}" for run in ours if (problem := check.why_wrong(run))]
    if problems:
        found.wrong += [f"{group}: {case}: {problem}" for problem in problems]
        return "WRONG: " + "; ".join(problems)
    peers = []
    for run in call.peers(found.refused):
        other = check.why_other(run)
        if other:
            found.refused.append(f"{run.name}, {case}: another answer: {other}")
        else:
            peers.append(run)
    # The formulas take gigabytes.
    del check
    times = in_turns([*ours, *peers], device)
    found.times.setdefault(group, {})[case] = times
    read = (call.k.numel() + call.v.numel()) * call.k.element_size()
    found.work[case] = float(read) if case.decode else case.flops(call.pairs)
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())


def look(found: Found, group: str, case: Case, device: str) -> str:
    call = Call.make(case, device)
    peer = next(run for run in call.peers(found.refused) if run.name in ("cuDNN", "SDPA"))
    asked = questions.asked_of(regard.trace(call.q, call.k, call.v, **call.kind.regard))
    problems = questions.why_wrong_looks(call, asked)
    if problems:
        found.wrong += problems
        return "WRONG: " + "; ".join(problems)
    times = questions.milliseconds(call, asked, peer, device)
    unit = times.pop(peer.name)
    for name, ms in times.items():
        row = {"question": name, "case": str(case), "ms": ms, OF_CUDNN: ms / unit}
        found.looks.append(row)
    return ", ".join(f"{name} {ms / unit:.2f}" for name, ms in times.items())


def report(found: Found, groups: list[str], about: dict[str, Any], folder: Path | None) -> int:
    planned = {name: len(GROUPS[name]) for name in groups if name != LOOKING}
    about |= {"measured": "one call between two synchronisations, the median of 7 to 31 in turns"}
    about |= {"cases that are wrong": len(found.wrong), "left out for time": len(found.too_late)}
    write("gpu_grid", found.tables(planned), about, folder)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
