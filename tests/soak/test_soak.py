"""A few seconds of the soak; `make soak` runs it for minutes."""

from __future__ import annotations

import sys

import pytest

from tests.soak import __main__ as command
from tests.soak import training


# Where Python cannot raise an interrupt, in the middle of an import, it tells of it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_training_with_all_that_may_happen_to_it() -> None:
    counts = training.run(1.0, seed=8)
    for what in ("steps", "lines", "interrupts heard", "disks full", "runs watched beside"):
        assert counts[what] > 0, what


def test_the_command_says_what_it_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[float, int]] = []

    def run(seconds: float, seed: int, tell: object) -> dict[str, int]:
        asked.append((seconds, seed))
        return {"rounds": 1234}

    monkeypatch.setattr(training, "run", run)
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes", "0.5", "--seed", "3", "training"])
    command.main()
    assert asked == [(30.0, 3)]
    assert "1,234 rounds\nnothing was left behind\n" in capsys.readouterr().out
