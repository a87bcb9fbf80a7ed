"""What became of each test of a peer, in a run of pytest by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import regard

PLUGINS = Path(__file__).parent / "plugins"
_WORST = ("passed", "skipped", "failed")


class NoOutcomesError(Exception):
    """There are no outcomes: what pytest said instead."""


@dataclass(frozen=True)
class Outcome:
    outcome: str
    why: str = ""


@dataclass
class Outcomes:
    """What became of each test, and how much of the attention in them was regard's."""

    tests: dict[str, Outcome] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, line: str) -> None:
        noted = json.loads(line)
        test = noted.pop("test", None)
        if test is None:
            self.counts |= noted
            return
        found, before = Outcome(**noted), self.tests.get(test)
        # A test is reported on more than once where it has parts, or is not taken down well.
        if before is None or _WORST.index(found.outcome) > _WORST.index(before.outcome):
            self.tests[test] = found


def run(
    checkout: Path, arguments: Sequence[str], plugins: Sequence[str] = (), **variables: str
) -> Outcomes:
    """The outcomes of a checkout's tests, in a process that has these plugins of ours."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes"
        found = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outcome_file",
             *(word for name in plugins for word in ("-p", name)), *arguments],
            cwd=checkout,
            env=_environment(checkout, file) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )  # fmt: skip
        outcomes = Outcomes()
        for line in file.read_text().splitlines() if file.exists() else ():
            outcomes.note(line)
    # 0: all passed, 1: some did not. Anything else is no run of tests.
    if found.returncode not in (0, 1) or not outcomes.tests:
        tail = "\n".join(found.stdout.splitlines()[-30:])
        raise NoOutcomesError(f"{' '.join(arguments)} in {checkout} did not run:\n{tail}")
    return outcomes


def _environment(checkout: Path, file: Path) -> dict[str, str]:
    ours = Path(regard.__file__).parent.parent
    # Before what is installed: tests and what they test are of one version.
    theirs = checkout / "src"
    path = [*map(str, (PLUGINS, ours, theirs)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # A whole checkout of PyTorch has a folder torch, which is not built.
        "PYTHONSAFEPATH": "1",
        "REGARD_PEERS_OUTCOMES": str(file),
        # Weights from the hub say nothing about attention, and take longest.
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
