"""Runs cases, each by its own seed, and counts how they end."""

from __future__ import annotations

import gc
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from regard import RegardError
from tests.fuzz.targets import Target

REFUSED = "refused"
MEMORY = 1 << 30
"""Bytes that a case may add to what the process holds."""


class TooSlow(BaseException):
    """Not an Exception, so that nothing that is tried catches it."""


@dataclass
class Outcome:
    """How the cases of a target ended."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0

    def __str__(self) -> str:
        counted = ", ".join(f"{word} {n}" for word, n in sorted(self.counts.items()))
        took = f"{self.seconds:.0f} s, slowest {self.slowest:.2f} s"
        return f"{self.name:<14} {sum(self.counts.values()):>6} cases: {counted} ({took})"


def run(target: Target, cases: int, seed: int, most_findings: int = 20) -> Outcome:
    """Cases `0 … cases - 1` of a seed; one of them is drawn again by the same numbers."""
    outcome = Outcome(target.name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as kept, _limited():
        case = target.prepare(Path(kept))
        began = time.monotonic()
        for number in range(cases):
            folder = Path(tempfile.mkdtemp(dir=kept))
            at = time.monotonic()
            try:
                with _timed(target.seconds):
                    word = case(Random(f"{target.name} {seed} {number}"), folder)
            except RegardError:
                word = REFUSED
            except (Exception, TooSlow, SystemExit) as error:
                word = f"FOUND {type(error).__name__}"
                told = "".join(traceback.format_exception(error)[-4:])
                outcome.findings.append(f"{target.name} --seed {seed} case {number}\n{told}")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            outcome.counts[word] += 1
            outcome.slowest = max(outcome.slowest, time.monotonic() - at)
            if len(outcome.findings) >= most_findings:
                break
        outcome.seconds = time.monotonic() - began
    return outcome


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    """Ends what takes longer, on systems that have the signal for it."""

    def late(*_: object) -> None:
        raise TooSlow(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limited() -> Iterator[None]:
    """No more address space than the process has, and some: larger claims are a MemoryError."""
    gc.collect()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + 2 * MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
