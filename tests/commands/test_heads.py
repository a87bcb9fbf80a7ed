"""The command regard heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regard import cli, interpret, models
from regard.commands import heads as command
from regard.interpret.head_scores.texts import probes

TEXTS = [
    "The animal didn't cross the street because it was too tired.",
    "The animal did not eat the food because it was too old.",
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(probes, "PERIOD", 16)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(TEXTS) + "\n")
    return str(path)


def test_a_table_a_link_and_a_picture(texts: str, tmp_path: Path) -> None:
    picture = tmp_path / "heads.svg"
    result = CliRunner().invoke(
        cli.app, ["heads", "--texts", texts, "--link", "it", "animal", "-o", str(picture)]
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "regard-small: 64 heads of 8 layers, 2 texts"
    assert any(line.startswith("it → animal  layer 7 head 1") for line in lines[2:6])
    (layer,) = [line.split() for line in lines if line.startswith("    4 ")]
    assert layer[1 + 5] == "induction"
    (induction,) = [line.split() for line in lines if line.startswith("probe induction")]
    assert induction[2] == "4.5"
    drawn = picture.read_text()
    for title in ("badge", "probe induction", "copying", "regard-small"):
        assert title in drawn


def test_json_is_what_python_gives(texts: str) -> None:
    result = CliRunner().invoke(cli.app, ["heads", "--texts", texts, "--json", "--no-random"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    python = interpret.heads(models.load("regard-small", device="cpu"), TEXTS, random=False)
    assert found["badges"] == [list(row) for row in python.badges()]
    assert found["texts"] == 2
    mine, theirs = found["heads"][37]["scores"], python[37].scores
    assert mine["first"]["value"] == pytest.approx(theirs["first"].value)
    assert mine["first"]["random"] is None
    assert found["links"] == []


def test_what_cannot_be_asked_is_explained(texts: str, tmp_path: Path) -> None:
    def said(*args: str) -> str:
        result = CliRunner().invoke(cli.app, ["heads", *args])
        assert result.exit_code == 2
        assert not result.stdout
        return result.stderr

    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert "there is no text in the file" in said("--texts", str(empty))
    assert "the text cannot be read" in said("--texts", str(tmp_path / "none"))
    assert "do not stand in any text together" in said("--texts", texts, "--link", "it", "whale")
    assert "by the ending of its name" in said("--texts", texts, "-o", "heads.txt")


def test_without_texts_passages_are_read() -> None:
    found = command.passages(models.load("regard-small", device="cpu"))
    assert found[0].startswith("in the beginning god created th")
    assert len({*found}) == 64
    assert all(100 < len(text) < 1500 for text in found)


def test_of_passages_as_much_is_read_as_the_model_can() -> None:
    whole = command.passages(models.load("regard-small", device="cpu"))
    translator = models.load("regard-king-james", device="cpu")
    found = command.passages(translator)
    assert all(all_of.startswith(text) for all_of, text in zip(whole, found, strict=True))
    lengths = [translator.ids(text).shape[1] for text in found]
    assert 90 < max(lengths) <= translator.longest == 160
    assert 1 < sum(all_of == text for all_of, text in zip(whole, found, strict=True)) < 64
