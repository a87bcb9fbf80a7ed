"""What is waited for before a kernel runs: first calls, Python, and compiled calls.

PYTHONPATH=src python -m benchmarks.calls.latency [--device cuda] [--only first,python] [--quick]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.calls import latency_kinds, latency_small
from benchmarks.calls.latency_kinds import AFTER, FIRST, OURS, PEER, Kind, Sequence, Timed
from benchmarks.measurement import RESULTS, write

ROOT = Path(__file__).parents[2]
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    # Where regard keeps what it compiles for a CPU.
    "XDG_CACHE_HOME": "home",
}
LONGEST = 300
"""Seconds after which a process of its own counts as failed."""
Rows = list[dict[str, Any]]


@dataclass
class Setup:
    """How a run is made, and what it left out."""

    device: str
    quick: bool
    jobs: int
    until: float
    folder: Path
    left_out: list[str] = field(default_factory=list)
    failed: bool = False

    def patient(self, case: str) -> bool:
        """Whether a new case may be started."""
        if time.monotonic() < self.until:
            return True
        self.left_out.append(f"{case}: not started, the time was up")
        return False

    def kinds(self, kinds: Iterable[Kind]) -> list[Kind]:
        """On a card in the widths that people use, on a CPU in a size for it."""
        chosen = list(kinds)[:2] if self.quick else list(kinds)
        if self.device == "cpu":
            return [replace(kind.shorter(), D=64) for kind in chosen]
        return [
            replace(kind, D=D) for D in ((128,) if self.quick else (128, 64)) for kind in chosen
        ]


def in_own_process(
    setup: Setup, sequence: Sequence, caches: Path
) -> tuple[list[Timed | None], str]:
    """Seconds of calls that one fresh process makes with caches of its own, and what went wrong."""
    environment = os.environ | {name: str(caches / part) for name, part in CACHES.items()}
    paths = [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    asked = json.dumps([[asdict(kind), who] for kind, who in sequence])
    this = [sys.executable, "-m", "benchmarks.calls.latency"]
    command = [*this, "--device", setup.device, "--child", asked]
    # Files, so that what was said before a process had to be stopped is there.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        trouble = ""
        try:
            done = subprocess.run(
                command, stdout=said, stderr=complained, env=environment, timeout=LONGEST,
                check=False,
            )  # fmt: skip
            said.seek(0), complained.seek(0)
            trouble = _reason(complained.read()) if done.returncode else ""
        except subprocess.TimeoutExpired:
            said.seek(0)
            trouble = f"stopped after {LONGEST} s"
        times = [json.loads(line) for line in said if line.startswith(("null", "["))]
    found: list[Timed | None] = [None if t is None else Timed(*t) for t in times]
    return found + [None] * (len(sequence) - len(found)), trouble


def _reason(complaint: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line for line in complaint.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Unsupported)\w*: ", line)]
    return ((named or lines)[-1] if lines else "it ended without a word")[:160]


def child(asked: str, device: str) -> None:
    """The other side of `in_own_process`."""
    latency_kinds.warmed(device)
    for kind, who in json.loads(asked):
        found = latency_kinds.timed(Kind(**kind), who, device)
        print(json.dumps(found and [found.seconds, found.before]), flush=True)


def waited(setup: Setup, sequences: list[Sequence], state: str) -> list[list[Timed | None]]:
    """Each sequence in a process of its own, one after the other unless asked otherwise; what fails
    is left out and said. The folder of a sequence's caches is the same in every state."""

    def run(sequence: Sequence) -> list[Timed | None]:
        kind, who = sequence[0]
        case = f"{state}: {kind.name}, width {kind.D}, {who}"
        nothing: list[Timed | None] = [None for _ in sequence]
        if not setup.patient(case):
            return nothing
        named = re.sub(r"\W+", "_", f"{kind.name} {kind.D} {who} {len(sequence)}")
        folder = setup.folder / named
        cold = not folder.exists()
        folder.mkdir(exist_ok=True)
        if state == "warm" and cold:
            in_own_process(setup, sequence, folder)
        found, trouble = in_own_process(setup, sequence, folder)
        if trouble:
            print(f"  {case}: {trouble}", flush=True)
            setup.left_out.append(f"{case}: {trouble}")
            # Not every peer takes every case; we must.
            setup.failed |= who == OURS
        said = ", ".join("–" if t is None else f"{t.seconds:.2f} s" for t in found)
        print(f"  {case}: {said}", flush=True)
        return found

    with ThreadPoolExecutor(setup.jobs) as pool:
        return list(pool.map(run, sequences))


def _row(kind: Kind, ours: Timed | None, peer: Timed | None) -> dict[str, Any]:
    return {
        "call": kind.name,
        "width": kind.D,
        "heads": f"{kind.H}/{kind.G}",
        "queries × keys": f"{kind.B} × {kind.Q} × {kind.K}",
        "s": None if ours is None else ours.seconds,
        "what came before, s": None if ours is None or not ours.before else ours.before,
        "FlexAttention s": None if peer is None else peer.seconds,
        "/ FlexAttention": None if not (ours and peer) else ours.seconds / peer.seconds,
    }


def first(setup: Setup, state: str = "cold") -> Rows:
    """The first call of each kind in a process of its own."""
    kinds = setup.kinds(FIRST)
    sequences: list[Sequence] = [[(kind, who)] for kind in kinds for who in (OURS, PEER)]
    found = [times for (times,) in waited(setup, sequences, state)]
    pairs = zip(kinds, found[::2], found[1::2], strict=True)
    return [_row(kind, ours, peer) for kind, ours, peer in pairs]


def warm(setup: Setup) -> Rows:
    """The same in a new process, when another has filled the caches."""
    return first(setup, "warm")


def second(setup: Setup) -> Rows:
    """Further kinds in one process, after a causal trace of the same width and type."""
    kinds = setup.kinds(AFTER)
    rows: Rows = []
    for D in dict.fromkeys(kind.D for kind in kinds):
        mine = [kind for kind in kinds if kind.D == D]
        start = replace(mine[0], name="the first")
        sequences: list[Sequence] = [
            [(start, who), *((kind, who) for kind in mine)] for who in (OURS, PEER)
        ]
        ours, peer = waited(setup, sequences, "second")
        rows += [_row(*row) for row in zip([start, *mine], ours, peer, strict=True)]
    return rows


def python(setup: Setup) -> Rows:
    return _small(setup, latency_small.plain, latency_small.plain_cases(setup.device))


def compiled(setup: Setup) -> Rows:
    return _small(setup, latency_small.compiled, latency_small.compiled_cases(setup.device))


def _small(setup: Setup, measure: Callable[..., dict[str, Any]], cases: list[Any]) -> Rows:
    rows = []
    for case in cases:
        name = ", ".join(map(str, case))
        if not setup.patient(name):
            continue
        try:
            rows.append(measure(*case, setup.device, 5 if setup.quick else 40))
        # Whatever goes wrong with one call is said at the end; the others are still of use.
        except Exception as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            setup.failed = True
            setup.left_out.append(f"{name}: {type(error).__name__}: {lines[0][:160]}")
    return rows


SECTIONS: dict[str, tuple[str, Callable[[Setup], Rows], bool]] = {
    "first": ("First call of a kind in a new process, empty caches (lower is better)", first, True),
    "second": ("Further kinds after the first, in the same process", second, True),
    "warm": ("First call of a kind in a new process, caches filled by another", warm, True),
    "python": ("Python per small call (lower is better)", python, False),
    "compiled": ("Small calls compiled (lower is better)", compiled, False),
}
"""Title, what is run, and whether it is about kernels that only a card has."""
BARS = {"first": "≤ 3 s", "python": "≤ 60 µs attention, ≤ 90 µs trace"}
"""What is to be reached on a card."""


def worst(tables: dict[str, Rows], device: str) -> Rows:
    """The worst and the mean (geometric) of every column that tells a time or a ratio of ours."""
    rows: Rows = []
    for section, table in tables.items():
        for column in ("s", "/ FlexAttention", *_ratios(table)):
            found = [row[column] for row in table if row.get(column)]
            if section == "second" and column in ("s", "/ FlexAttention"):
                found = [row[column] for row in table if row[column] and row["call"] != "the first"]
            if found:
                mean = math.exp(statistics.fmean(map(math.log, found)))
                what = f"{section}: {column}"
                held = device == "cuda" and column in ("s", "back to back µs")
                bar = BARS.get(section) if held else None
                rows.append({"what": what, "worst": max(found), "mean": mean, "bar": bar})
    return rows


def _ratios(table: Rows) -> list[str]:
    ways = [f"{way}{rest}" for way in ("back to back", "single") for rest in _ENDS]
    return [column for column in ways if table and column in table[0]]


_ENDS = (" µs", " / best peer", ", compiled / plain", ", compiled / SDPA compiled")


def about(device: str, commit: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "load of the machine before": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    }
    if device == "cuda":
        import triton

        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": triton.__version__,
        }
    return found | ({"commit": commit} if commit else {})


def main() -> int:
    options = arguments().parse_args()
    if options.child:
        child(options.child, options.device)
        return 0
    tables: dict[str, Rows] = {}
    skipped = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        until = start + options.patience
        setup = Setup(options.device, options.quick, options.jobs, until, Path(folder))
        for name, (title, run, for_cards) in SECTIONS.items():
            if options.only and name not in options.only:
                continue
            if for_cards and options.device == "cpu" and not options.only:
                skipped.append(f"{title}: needs a card")
                continue
            print(f"{name} ({time.monotonic() - start:.0f} s so far)", flush=True)
            rows = run(setup)
            if rows:
                tables[name] = rows
    left_out = [*skipped, *setup.left_out]
    shown = {SECTIONS[name][0]: table for name, table in tables.items()}
    summary = worst(tables, options.device)
    shown = ({"Worst and mean": summary} if summary else {}) | shown
    if left_out:
        shown["Left out"] = [{"case and reason": reason} for reason in left_out]
    # A part of the table must not replace the whole.
    part = options.quick or options.only or setup.failed
    keep = options.out or (None if part else RESULTS)
    name = "latency_gpu" if options.device == "cuda" else "latency"
    more = about(options.device, options.commit)
    more |= {"processes at once": options.jobs, "checked": "every call against float64"}
    write(name, shown, more, keep)
    return int(setup.failed)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    card = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=card)
    parser.add_argument(
        "--only", type=_sections, metavar="NAME[,NAME]", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--quick", action="store_true", help="few cases, not kept")
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes at once; they disturb each other's times"
    )
    parser.add_argument(
        "--patience", type=float, default=math.inf, help="seconds after which no case is started"
    )
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def _sections(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}"
        )
    return names


if __name__ == "__main__":
    sys.exit(main())
