"""`regard view` of trace files and models: what is shown, written and refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import cli, models
from regard.commands import named_subject
from regard.seen import Seen
from regard.view.subjects import TOKEN, Look, Subject, ViewOptions, look
from tests.view import tiny_models
from tests.view.text_drawings import seen_model

pytestmark = pytest.mark.usefixtures("by_spelling")
runner = CliRunner()
TOKENS = ["<s>", " the", " cat", " sat", ".", " The"]


@pytest.fixture(autouse=True)
def _console(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def seen() -> Seen:
    return seen_model(6)


@pytest.fixture
def file(seen: Seen, tmp_path: Path) -> Path:
    path = tmp_path / "run.regard"
    seen.save(path, tokens=TOKENS)
    return path


def output(*args: object) -> str:
    result = runner.invoke(cli.app, ["view", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*args: object) -> str:
    result = runner.invoke(cli.app, ["view", *map(str, args)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def cells(text: str, rows: int = 6) -> list[list[str]]:
    """The numbers of the heat map in an output, by columns."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "entropy  strongest" in line) + 1
    return [
        [line[9 + 3 * i : 12 + 3 * i].strip() for i in range(rows)]
        for line in lines[first : first + rows]
    ]


def in_percent(weights: torch.Tensor) -> list[list[str]]:
    return [
        ["" if k > q else "." if w < 0.005 else f"{100 * w:.0f}" for k, w in enumerate(row)]
        for q, row in enumerate(weights.tolist())
    ]


def test_a_trace_file_shows_every_head_and_the_sharpest_of_them(file: Path, seen: Seen) -> None:
    text = output(file)
    assert text.splitlines()[0] == "Layers read 6 tokens: 3 layers of 4 heads"
    assert re.search(r"^entropy +sink +distance", text, re.MULTILINE)
    (name,) = re.findall(r"layer (\d), head (\d), the sharpest that looks past the first", text)
    layer, head = map(int, name)
    found = regard.view.atlas.head_figures(seen)
    both = [
        [e + s for e, s in zip(*rows, strict=True)]
        for rows in zip(found.entropy, found.sink, strict=True)
    ]
    assert both[layer][head] == min(min(row) for row in both)
    assert cells(text) == in_percent(seen[f"layers.{layer}"].trace.weights()[0, head])
    assert f"(layers.{layer})" in text


@pytest.mark.parametrize(
    ("args", "layer", "head"),
    [
        (["--layer", "1", "--head", "2"], 1, 2),
        (["--layer", "layers.2", "--head", "-1"], 2, 3),
        (["--layer", "1"], 1, "mean"),
        (["--layer", "*.0", "--head", "mean"], 0, "mean"),
    ],
)
def test_layer_and_head_choose(
    args: list[str], layer: int, head: int | str, file: Path, seen: Seen
) -> None:
    text = output(file, *args)
    weights = seen[f"layers.{layer}"].trace.weights()[0]
    assert cells(text) == in_percent(weights.mean(0) if head == "mean" else weights[head])
    name = "mean of 4 heads" if head == "mean" else f"head {head}"
    assert f"layer {layer}, {name} (layers.{layer})" in text
    assert "sink" not in text


@pytest.mark.parametrize(
    ("token", "place"), [("sat", 3), (" sat", 3), ("the", 5), ("2", 1), (None, 5), (".", 4)]
)
def test_a_token_looks_and_is_looked_at(
    token: str | None, place: int, file: Path, seen: Seen
) -> None:
    args = [] if token is None else ["--token", token]
    lines = output(file, "--layer", 1, "--head", 2, *args).splitlines()
    weights = seen["layers.1"].trace.weights()[0, 2]
    name = f"'{TOKENS[place].strip()}' (token {place + 1})"
    at = lines.index(f"what {name} looks at, in percent")
    row = [f"{100 * w:.0f}" if w >= 0.005 else "." for w in weights[place, : place + 1].tolist()]
    assert lines[at + 2].split() == row
    at = lines.index(f"who looks at {name}, in percent of what each gives")
    column = [f"{100 * w:.0f}" if w >= 0.005 else "." for w in weights[place:, place].tolist()]
    assert lines[at + 2].split() == column


def test_numbers_are_shown_on_demand(file: Path, seen: Seen) -> None:
    text = output(file, "--numbers", "--layer", 0)
    row = re.search(r"^2 +(.*)", text, re.MULTILINE)
    assert row is not None
    found = regard.view.atlas.head_figures(seen)
    assert row[1].split()[:4] == [f"{100 * v:.0f}" for v in found.entropy[2]]
    assert "mean of 4 heads" in text


def test_files_of_statistics_show_what_they_have(tmp_path: Path) -> None:
    path = tmp_path / "statistics.regard"
    seen_model(6, keep="statistics").save(path)
    text = output(path)
    assert "entropy: how spread a row is, in nats" in text
    assert "only statistics were kept: there are no weights to show" in text
    assert "no traces, only statistics" in refused(path, "--layer", 0)
    said = refused(path, "--picture", tmp_path / "map.png", "--kind", "map")
    assert "accepted: --kind heads or entropy" in said
    assert "wrote" in output(path, "--picture", tmp_path / "heads.png")


def test_files_with_several_calls_need_one(tmp_path: Path) -> None:
    path = tmp_path / "calls.regard"
    seen_model(4, calls=3).save(path)
    assert "was called 3 times" in refused(path, "--layer", 0)
    assert "layer 0, head 1" in output(path, "--layer", 0, "--head", 1, "--call", 2)


def test_texts_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("the reader reads", encoding="utf-8")
    assert output(path) == output("the reader reads")


def test_a_trace_file_is_known_by_its_bytes_too(file: Path) -> None:
    other = file.with_name("renamed")
    other.write_bytes(file.read_bytes())
    assert output(other).replace("renamed", "run.regard") == output(file)


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    assert "that is a folder, not a text" in refused(tmp_path)
    assert "there is no word in the text" in refused("")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "marked.txt"
    path.write_text("the reader reads", encoding="utf-8-sig")
    assert named_subject.text_of(str(path)) == "the reader reads"


def test_a_picture_of_no_format_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.commands.view.subject_of", None)
    assert "by the ending of its name" in refused("a b", "--picture", tmp_path / "map.txt")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("nowhere.regard", None, "there is no such file"),
        ("nowhere.txt", None, "there is no such file"),
        ("empty.txt", b"", "there is no word in the text"),
        ("latin.txt", b"caf\xe9", "the text cannot be read"),
        ("cut.regard", b"\x10\x00\x00\x00\x00\x00\x00\x00{", "cannot be read as a trace file"),
        ("text.regard", b"only words", "cannot be read as a trace file"),
    ],
)
def test_files_that_cannot_be_shown(
    name: str, content: bytes | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert says in refused(tmp_path / name)


def test_words_that_are_no_names_of_files_are_text() -> None:
    assert "2 words" in output("see notes.txt")
    assert "1 word " in output("x" * 5000)
    assert "1 word " in output("nul\x00byte")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--head", "1"], "--head counts the heads of one layer"),
        (["--layer", "9"], "no such layer was seen\n  got:      '9'\n  accepted: 0 to 2"),
        (["--layer", "0", "--head", "9"], "there is no such head"),
        (["--layer", "0", "--head", "some"], "--head is a number, or mean"),
        (["--token", "dog"], "a token of the text, or a number from 1 to 6"),
        (["--token", "7"], "do:       tokens: <s> the cat sat . The"),
        (["--call", "1"], "was called 1 times"),
        (
            ["--mask", "causal"],
            "a trace file has its own attention, which is not recomputed",
        ),
        (["--model", "m", "--score", "dot"], "got:      --model, --score"),
        (["--kind", "map"], "--kind, --dark and --width say how a picture is drawn"),
        (["--dark"], "got:      no --picture"),
        (["--picture", "x.png", "--kind", "vibes"], "unknown kind of picture\n  got:      'vibes'"),
        (["--picture", "x.gif"], "the format of a picture is chosen by the ending of its name"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_explained(args: list[str], says: str, file: Path) -> None:
    assert says in refused(file, *args)


def test_spelling_has_one_layer_of_one_head() -> None:
    assert output("a b", "--layer", 0, "--head", 0) == output("a b")
    assert "there is only one layer" in refused("a b", "--layer", 1)
    assert "there is no such head" in refused("a b", "--head", 1)


@pytest.mark.parametrize("kind", [None, "map", "arcs", "heads", "entropy"])
def test_pictures_are_written(kind: str | None, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    args = [] if kind is None else ["--kind", kind]
    assert re.fullmatch(
        rf"wrote\s+{path}\s+\([\d.]+ KiB\)\n", output(file, "--picture", path, *args)
    )
    texts = [e.text for e in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    says = {"heads": "on the first token", "entropy": "entropy / log of visible keys"}
    assert says.get(kind or "map", "cat") in texts
    assert ("looks at, in percent" in texts) == (kind == "arcs")


def figure_of(seen: Seen, **wanted: Any) -> Any:
    from regard.view.pictures.subject_picture import drawn

    seen.tokens = TOKENS
    this: Look = look(Subject(seen, None, "", ""), ViewOptions(**wanted))
    return drawn(this)


def test_a_named_token_gives_its_arcs(seen: Seen) -> None:
    figure = figure_of(seen, layer="1", head="2", token="sat", dark=True)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "looks at, in percent" in texts
    assert f"{seen.model} · layer 1, head 2" in texts
    weights = seen["layers.1"].trace.weights()[0, 2, 3]
    for weight in weights.tolist():
        assert weight < 0.05 or f"{100 * weight:.0f}" in texts


def test_a_map_is_that_of_the_head(seen: Seen) -> None:
    figure = figure_of(seen, layer="2", head="1")
    shown = torch.tensor(figure.axes[0].collections[0].get_array().filled(0.0))
    torch.testing.assert_close(shown, seen["layers.2"].trace.weights()[0, 1])


def test_a_picture_and_the_terminal_can_both_be_had(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    text = output("a b", "--picture", path, "--terminal")
    assert text.startswith(output("a b"))
    assert path.stat().st_size > 1000


def test_a_page_is_written(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("regard.view.web")
    path = tmp_path / "p.html"
    assert "wrote" in output(file, "--page", path)
    assert path.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_a_model_reads(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    told = []

    class Reader(models.Reader):
        def run(self, text: str, **how: Any) -> Seen:
            told.append(text)
            seen.tokens = TOKENS
            return seen

        def __repr__(self) -> str:
            return "Reader('small')"

    reader = Reader("small", torch.nn.Identity(), None, models.Card({}), None)
    monkeypatch.setattr(models, "load", lambda name, **how: reader, raising=False)
    text = output("the", "cat", "--model", "small")
    assert told == ["the cat"]
    assert text.splitlines()[:2] == [
        "small reads 6 tokens: 3 layers of 4 heads",
        "Reader('small')",
    ]
    assert "has its own attention" in refused("the cat", "--model", "small", "--mask", "causal")
    assert "there is no word in the text" in refused(" ", "--model", "small")


def test_the_example_is_about_its_own_token() -> None:
    assert f"what '{TOKEN}' (word 14)" in output()


def test_the_small_model_reads_where_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = tmp_path / named_subject.SMALL
    tiny_models.causal(small)
    monkeypatch.setattr(named_subject, "EMBEDDED", tmp_path)
    monkeypatch.setattr(models.named_models, "EMBEDDED", tmp_path)
    assert output("The cat sat").startswith("regard-small reads ")
    assert "blocks.0.attention" in output("The cat sat", "--layer", 0)
    for args in (["--model", "spelling"], ["--mask", "causal"]):
        assert "2 words compared by their spelling" in output("The cat", *args)
    assert "201 words compared by their spelling" in output("cat " * 201)
    (small / "model.safetensors").unlink()
    assert "2 words compared by their spelling" in output("The cat")
