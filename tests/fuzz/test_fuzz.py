"""A little of `make fuzz`, the same each time; and that it finds what is wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from regard import RegardError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds are set as Linux has them")

if sys.platform == "linux":
    from tests.fuzz.case_runner import run
    from tests.fuzz.targets import Case, Target, targets

CASES = {"trace files": 40, "own folders": 25, "model folders": 6, "command line": 10}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_nothing_but_errors_of_regard_and_right_data(name: str) -> None:
    if name == "model folders":
        pytest.importorskip("transformers")
    if find_spec("transformers"):
        # Folders of other models are read by it; no case is to wait for its files.
        import_module("transformers.models.auto.modeling_auto")
    target = next(t for t in targets() if t.name == name)
    outcome = run(target, CASES[name], seed=1)
    assert not outcome.findings, "\n".join(outcome.findings)
    assert sum(outcome.counts.values()) == CASES[name]


def test_every_target_is_run_here() -> None:
    assert {t.name for t in targets()} >= CASES.keys()


def _raises(error: BaseException) -> Callable[[Path], Case]:
    def case(draw: Random, folder: Path) -> str:
        raise error

    return lambda kept: case


def test_what_is_wrong_is_found() -> None:
    def slow(draw: Random, folder: Path) -> str:
        time.sleep(5)
        return "done"

    def greedy(draw: Random, folder: Path) -> str:
        return f"{len(bytearray(8 << 30))} bytes"

    for prepare in (_raises(KeyError("x")), lambda kept: slow, lambda kept: greedy):
        outcome = run(Target("wrong", prepare, seconds=0.2), 1, 0)
        assert len(outcome.findings) == 1
    assert run(Target("right", _raises(RegardError("no"))), 2, 0).counts == {"refused": 2}
