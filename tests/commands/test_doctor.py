"""The command regard doctor: what is here, and what runs here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import cli
from regard.cost import this_machine


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")


def output(*args: str) -> str:
    result = CliRunner().invoke(cli.app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_doctor_reports_versions_and_every_backend() -> None:
    text = output("doctor")
    assert regard.__version__ in text
    assert torch.__version__ in text
    for name in regard.calls.dispatch.BACKENDS:
        assert re.search(rf"^ {name} ", text, re.MULTILINE)
    tiled = next(line for line in text.splitlines() if line.startswith(" tiled"))
    assert tiled.rstrip().endswith("runs")
    assert "it keeps no row statistics" in text
    assert "inner loop of tiled: compiled for this CPU, products and all\n" in text


def test_doctor_measures_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "SECONDS", 0.01)
    monkeypatch.setitem(this_machine.SIDE, "cpu", 128)
    monkeypatch.setitem(this_machine.COPIED, "cpu", 1 << 20)
    assert "copies" not in output("doctor")
    text = output("doctor", "--measure")
    for line in ("float32", "bfloat16", "copies", "--device here"):
        assert line in text
    assert "at best on this machine" in output("cost", "-m", "gpt2", "--device", "here")
    assert "this machine" in output("cost")
