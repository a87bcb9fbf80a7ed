"""The command as a whole: its version, its help, and how it is started."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import regard
from regard import cli
from tests.fresh_process import FreshProcesses


@pytest.fixture(autouse=True)
def _console(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")


def output(*args: str) -> str:
    result = CliRunner().invoke(cli.app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_version_and_help() -> None:
    assert output("--version") == f"regard {regard.__version__}\n"
    text = output("--help")
    assert "view" in text
    assert "doctor" in text
    for option in ("--mask", "--score", "--temperature", "--token", "--plain"):
        assert option in output("view", "--help")


def test_the_module_runs_as_the_command(fresh: FreshProcesses) -> None:
    done = fresh("""
import runpy, sys
sys.argv = ["regard", "view", ""]
runpy.run_module("regard", run_name="__main__", alter_sys=True)
""")
    assert done.code == 2
    assert done.err.startswith("regard: there is no word in the text")
