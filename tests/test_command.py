"""The command before PyTorch: help, version, completion and mistakes are answered at once."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import regard
import regard_command
from regard import cli
from tests.fresh_process import FreshProcesses

SOURCE = Path(__file__).parents[1] / "src"
SLOW = ("torch", "regard", "matplotlib", "transformers", "jaxtyping")


CONSOLE = {"PYTHONPATH": str(SOURCE), "COLUMNS": "80", "TERM": "dumb"}
Answer = tuple[int, str, list[str]]
"""An exit code, what is said, and what slow packages were imported for that."""


def program(*args: str, **env: str) -> str:
    """Runs the command, and says at last which slow packages are there."""
    return (
        "import os, sys\n"
        f"os.environ |= {env!r}\n"
        "from regard_command import main\n"
        f"sys.argv = ['regard', *{list(args)!r}]\n"
        "try: code = main() or 0\n"
        "except SystemExit as end: code = end.code or 0\n"
        f"print([name for name in {SLOW!r} if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )


def answer(code: int, out: str, err: str) -> Answer:
    *said, imported = err.splitlines()
    return code, out + "\n".join(said), ast.literal_eval(imported)


def asked(*args: str, **env: str) -> Answer:
    """The command as a shell starts it."""
    done = subprocess.run(
        [sys.executable, "-c", program(*args)],
        capture_output=True,
        text=True,
        env=os.environ | CONSOLE | env,
    )
    return answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("args", [["--help"], ["-h"], []])
def test_help_needs_no_torch(args: list[str]) -> None:
    code, said, imported = asked(*args)
    assert imported == []
    assert code == (0 if args else 2)
    assert "See attention: over a sentence" in said


def test_help_is_that_of_the_commands_themselves() -> None:
    told = CliRunner().invoke(regard_command.app, ["--help"], prog_name="regard")
    whole = CliRunner().invoke(cli.app, ["--help"], prog_name="regard")
    assert told.exit_code == 0
    assert told.output == whole.output
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert list(regard_command.COMMANDS) == list(commands)


def test_the_version_needs_no_torch() -> None:
    code, said, imported = asked("--version")
    assert (code, imported) == (0, [])
    assert said.strip() == f"regard {regard.__version__}"


def test_a_mistake_needs_no_torch() -> None:
    code, said, imported = asked("veiw", "a text")
    assert (code, imported) == (2, [])
    assert "No such command 'veiw'" in said
    code, said, imported = asked("--verison")
    assert (code, imported) == (2, [])
    assert "--verison" in said


def test_names_are_completed_without_torch() -> None:
    code, said, imported = asked(
        _REGARD_COMPLETE="complete_bash", COMP_WORDS="regard re", COMP_CWORD="1"
    )
    assert (code, said.split(), imported) == (0, ["record"], [])
    code, said, imported = asked(
        _REGARD_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="regard view"
    )
    assert (code, imported) == (0, [])
    assert "view" in said


def test_options_are_completed_by_their_command(fresh: FreshProcesses) -> None:
    words = {"COMP_WORDS": "regard doctor --me", "COMP_CWORD": "2"}
    code, said, imported = answer(*fresh(program(_REGARD_COMPLETE="complete_bash", **words)))
    assert (code, said.split()) == (0, ["--measure"])
    assert "regard" in imported


def test_a_command_runs(tmp_path: Path, fresh: FreshProcesses) -> None:
    code, said, imported = asked("cost", "--model", "gpt2", "--context", "64")
    assert code == 0
    assert "forward pass" in said
    assert "torch" in imported
    wrong = ("record", "--model", "x", "--text", "none.txt", "-o", str(tmp_path / "o"))
    code, said, _ = answer(*fresh(program(*wrong)))
    assert code == 2
    assert said.startswith("regard: the text cannot be read")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}


@pytest.fixture(scope="module")
def in_ascii() -> Iterator[FreshProcesses]:
    """Python was started where nothing is UTF-8."""
    with FreshProcesses(**CONSOLE, **ASCII) as processes:
        yield processes


def test_help_that_cannot_be_encoded_has_question_marks() -> None:
    code, said, _ = asked("--help", **ASCII)
    assert code == 0, said
    assert "?" in said


@pytest.mark.parametrize("command", ["lab", "doctor"])
def test_what_cannot_be_encoded_is_a_question_mark(command: str, in_ascii: FreshProcesses) -> None:
    code, said, _ = answer(*in_ascii(program(command)))
    assert code == 0, said
    assert "?" in said


def test_a_model_reads_where_files_are_not_utf8_by_default(in_ascii: FreshProcesses) -> None:
    text = ("view", "--terminal", "--model", "regard-small", "a red ball")
    code, said, _ = answer(*in_ascii(program(*text)))
    assert code == 0, said
    assert "regard-small reads 4 tokens" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_a_full_disk_is_told_of_in_words() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "regard", "lab"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "regard: what it says cannot be written: No space left on device\n"


def test_nothing_is_said_of_a_numpy_that_nothing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(prog_name: str) -> None:
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", stacklevel=1)
        raise SystemExit(0)

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["regard", "doctor"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SystemExit):
            regard_command.main()
