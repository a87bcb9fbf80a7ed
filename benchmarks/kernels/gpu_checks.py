"""What must be green before a speed is reported: conformance, poisoned memory, sanitizers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import regard
from regard import masks

ROOT = Path(__file__).parents[2]
THIS = [sys.executable, "-m", "benchmarks.kernels.gpu"]
SUITES = [f"tests/parity/test_{name}.py" for name in ("triton", "poisoned", "hard_cases")]
SANITIZERS = {
    # The tool knows allocations, so each tensor gets its own, with a gap behind it.
    "memcheck": ["--padding", "512", "--report-api-errors", "no"],
    "racecheck": [],
}
LEFT_OUT = (
    "kernels for Hopper left out, where it reports the byte by which the compiler's own code tells "
    "each warp what to do, written before a barrier and read behind it"
)
PATIENCE = 300
"""Seconds after which a check counts as failed."""


@dataclass(frozen=True)
class Command:
    """One process of the checks."""

    name: str
    words: list[str]
    alone: bool = False
    """Whether PyTorch asks the driver for each tensor instead of keeping memory."""


@dataclass(frozen=True)
class Ended:
    name: str
    code: int
    output: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a check came to. One that could not run is neither green nor red, and says why."""

    name: str
    said: str
    red: bool = False


def check_all(processes: int, warm: Iterable[str], patience: float) -> list[Outcome]:
    """Run every check at once, the tests in so many processes, and meanwhile compile what will be
    measured: `warm` names benchmark groups."""
    tool = shutil.which("compute-sanitizer")
    commands = [
        Command(name, [str(tool), "--tool", name, *how, *THIS, "--sanitized", name], alone=True)
        for name, how in SANITIZERS.items()
        if tool
    ]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cuda"]
    commands += [
        Command("pytest", [*pytest, "--share", f"{i}/{processes}", *SUITES])
        for i in range(processes)
    ]
    commands += [Command("warm", [*THIS, "--warm", group]) for group in warm]
    ended = run_all(commands, len(commands), patience)
    outcomes = [conformance([e for e in ended if e.name == "pytest"])]
    outcomes += [sanitized(e) for e in ended if e.name in SANITIZERS]
    if not tool:
        missing = "not run: compute-sanitizer is not on PATH"
        outcomes += [Outcome(name, missing) for name in SANITIZERS]
    for cold in (e for e in ended if e.name == "warm" and e.code):
        print(f"could not compile ahead:\n{_tail(cold.output)}", flush=True)
    return outcomes


def run_all(commands: list[Command], at_once: int, patience: float = PATIENCE) -> list[Ended]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda command: _run(command, patience), commands))


def _run(command: Command, patience: float) -> Ended:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    environment.pop("TRITON_INTERPRET", None)
    environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
    if command.alone:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command.words, cwd=ROOT, env=environment, timeout=patience, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        written = late.stdout or b""
        output = written if isinstance(written, str) else written.decode(errors="replace")
        code, output = 124, f"{output}\nstopped after {patience:g} s"
    took = time.perf_counter() - start
    print(f"  {command.name} ended with {code} after {took:.0f} s", flush=True)
    return Ended(command.name, code, output, took)


def conformance(shares: list[Ended]) -> Outcome:
    """All shares together: every test that was collected ran in one of them, and none failed."""
    counts: dict[str, int] = {}
    for share in shares:
        summary = share.output.strip().splitlines()[-1] if share.output.strip() else ""
        for number, what in re.findall(
            r"(\d+) (passed|failed|skipped|errors?|deselected)", summary
        ):
            counts[what] = counts.get(what, 0) + int(number)
    left_to_others = counts.pop("deselected", 0)
    said = ", ".join(f"{number} {what}" for what, number in counts.items()) or "no tests ran"
    # With n shares, each test is run in one and left out in n - 1.
    complete = left_to_others == (len(shares) - 1) * sum(counts.values()) and "passed" in counts
    # A share without tests ends with 5.
    broken = [share for share in shares if share.code not in (0, 5)]
    for share in broken:
        print(_failures(share.output), flush=True)
    if not complete:
        said += "; some tests did not run"
    return Outcome("conformance and poisoned memory", said, bool(broken) or not complete)


def _failures(output: str) -> str:
    """What pytest said went wrong: the short lines, and the reasons."""
    marked = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR", "E  "))]
    return "\n".join(marked[:60]) if marked else _tail(output)


def sanitized(ended: Ended) -> Outcome:
    """What a sanitizer found."""
    if "Device not supported" in ended.output:
        return Outcome(ended.name, "not run: it does not support this device")
    found = re.findall(r"ERROR SUMMARY: (\d+) error", ended.output)
    found += re.findall(r"RACECHECK SUMMARY: .*\((\d+) error", ended.output)
    errors = sum(map(int, found))
    if found and not errors and ended.code == 0:
        said = f"0 errors in {ended.seconds:.0f} s"
        return Outcome(ended.name, f"{said}; {LEFT_OUT}" if ended.name == "racecheck" else said)
    print(_reports(ended.output), flush=True)
    said = f"{errors} errors" if found else f"ended with {ended.code}"
    return Outcome(ended.name, said, red=True)


def _reports(output: str) -> str:
    """The first reports of a sanitizer, or the end of what was said if there is none."""
    lines = [x for x in output.splitlines() if x.startswith("=========")]
    return "\n".join(lines[:60]) if len(lines) > 3 else _tail(output)


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-40:])


def without_hopper() -> None:
    """Have the general kernels run where those for Hopper would."""
    from regard.backends.triton.questions import second_pass
    from regard.backends.triton.settings import tuning

    tuning.fits_hopper = second_pass.fits_hopper = lambda x: False


def sanitized_case(device: str) -> None:
    """Every kernel once on small, odd shapes: what the sanitizers watch."""
    for width, mask in ((64, masks.causal()), (80, None), (128, masks.causal() & masks.window(50))):
        q = torch.randn(1, 4, 111, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(1, 2, 111, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        t = regard.trace(q, k, v, mask=mask, backend="triton")
        (t.out.float().sum() + t.lse.sum() + t.entropy.sum()).backward()
        t = t.detach()
        answers = [t.out, t.received(), t.map(7), t.map(5, pool="max"), t.top(3).values]
        step = regard.trace(q[:, :, -1:].detach(), t.inputs.k, t.inputs.v, backend="triton")
        for answer in [*answers, step.out, step.lse, q.grad, k.grad, v.grad]:
            assert answer is not None
            assert bool(answer.isfinite().all())
    documents = masks.causal() & masks.documents(torch.arange(63)[None] // 20)
    q, k, v = (torch.randn(1, 2, 63, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    t = regard.trace(q, k, v, mask=documents, backend="triton")
    assert bool(t.out.isfinite().all() & t.received().isfinite().all())
    # Many keys for one query: split over programs, then merged.
    k, v = (torch.randn(1, 2, 1000, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    t = regard.trace(q[:, :, :1], k, v, backend="triton")
    assert bool(t.out.isfinite().all() & t.entropy.isfinite().all())
