"""The examples of docs/view.md: what they print, or that they run."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard import cli

pytestmark = pytest.mark.usefixtures("by_spelling")
PAGE = Path(__file__).parents[2] / "docs" / "view.md"


def commands() -> list[tuple[str, str]]:
    """Every command of the console blocks, with what it is said to print."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    calls = [call for block in blocks for call in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(first, rest) for first, _, rest in (call.partition("\n") for call in calls)]


@pytest.mark.parametrize(("command", "expected"), commands())
def test_console_example(command: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    name, *args = shlex.split(command.partition("<")[0], comments=True)
    assert name == "regard"
    result = CliRunner().invoke(cli.app, args, input="some words from a file")
    assert result.exit_code == 0, result.output
    if expected:
        assert [line.rstrip() for line in result.stdout.splitlines()] == expected.splitlines()


def test_there_is_an_example_with_its_output() -> None:
    assert len(commands()) > 5
    assert any(expected for _, expected in commands())


def test_python_examples() -> None:
    done = doctest.testfile(
        str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert done.attempted > 5
    assert not done.failed
