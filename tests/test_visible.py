"""What is from a file reaches the terminal as signs that are seen, and never as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import RegardError, cli
from regard.seen import Seen
from regard.visible import visible

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202edne\u2066\x08\r"
"""Names the window, clears the screen, colours, turns the line around, goes back."""


def commands(text: str) -> list[str]:
    """The characters of an output that a terminal obeys."""
    return [sign for sign in text if sign != "\n" and visible(sign) != sign]


def invoke(*words: object) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    seen = Seen(f"model {HOSTILE}")
    x = torch.randn(1, 2, 5, 4)
    for path in (f"layers.0{HOSTILE}", f"layers.1{HOSTILE}"):
        seen.layer(path).take(regard.trace(x, x, x), 0, keep=True)
    seen.save(tmp_path / "x.regard", tokens=[f"t{HOSTILE}"] * 5)
    return tmp_path / "x.regard"


def test_errors_quote_what_they_were_given_in_signs() -> None:
    error = RegardError(f"a {HOSTILE}", got=HOSTILE, accepted=HOSTILE, do=HOSTILE)
    assert not commands(str(error))
    assert str(error).count("\\x1b]0;owned\\x07") == 4
    assert str(RegardError("漢字 é\nsecond", got="naïve")) == "漢字 é\nsecond\n  got:      naïve"


def test_tables_of_layers_show_their_paths_in_signs(recorded: Path) -> None:
    with regard.load(recorded) as seen:
        assert not commands(repr(seen))
        assert not commands(repr(seen[f"layers.0{HOSTILE}"]))
        with pytest.raises(RegardError) as refused:
            seen[HOSTILE]
        assert not commands(str(refused.value))


@pytest.mark.parametrize("more", [[], ["--layer", 1, "--head", 0], ["--layer", HOSTILE]])
def test_a_hostile_file_is_shown_in_signs(more: list[Any], recorded: Path) -> None:
    result = invoke("view", recorded, "--terminal", *more)
    assert result.exit_code in (0, 2)
    assert "owned" in result.output
    assert not commands(result.output)


def test_hostile_words_are_quoted_in_signs(tmp_path: Path) -> None:
    out = tmp_path / "x"
    for words in (
        ("record", "--model", HOSTILE, "--text", tmp_path / HOSTILE, "-o", out),
        ("view", "a word", "--model", HOSTILE, "--terminal"),
        ("cost", "--model", HOSTILE),
        ("cost", "--model", "a" * 300),
    ):
        result = invoke(*words)
        assert result.exit_code == 2
        assert not commands(result.output)
        assert not isinstance(result.exception, (ValueError, OSError))


def test_a_folder_with_a_hostile_name_is_told_of_in_signs(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    about = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}
    (folder / "config.json").write_text(json.dumps(about))
    for words in (["--model", folder], ["--model", folder, "--model", folder]):
        result = invoke("cost", *words)
        assert result.exit_code == 0, result.output
        assert "owned" in result.output
        assert not commands(result.output)
