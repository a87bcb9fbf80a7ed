"""What was watched without traces: every view shows its statistics, and says how to keep more."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import cli
from regard.commands.first_view import first_view
from regard.commands.named_subject import subject_of
from regard.seen import Layer, Seen
from regard.view import head_grid
from regard.view.atlas import Atlas
from regard.view.subjects import Subject, ViewOptions
from regard.view.web import App, notebook, page, widget
from regard.view.web.atlas_queries import Answers
from tests.view.browser_page import Open
from tests.view.text_drawings import drawn, seen_model

KEEP = 'watch(model, keep="traces")'


def watched(layers: int = 3, heads: int = 4) -> Seen:
    """What `watch(model)` gives when nothing else is said."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, heads, batch_first=True),
        layers,
        enable_nested_tensor=False,
    ).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(2, 9, 16))
    return seen


def index_of(path: Path) -> Any:
    found = re.search(r'id="regard-index">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_atlas_holds_the_numbers_that_were_kept() -> None:
    seen = watched()
    atlas = Atlas.of(seen)
    assert atlas.maps == []
    assert [layer.name for layer in atlas.summaries] == list(seen)
    for layer, summary in zip(seen.values(), atlas.summaries, strict=True):
        assert summary.heads == 4
        assert summary.calls == 1
        found = summary.statistics()
        assert found["entropy"] == pytest.approx(layer.entropy.tolist(), abs=1e-5)
        assert found["first"] == pytest.approx(layer.first.tolist(), abs=1e-5)
        assert found["max_logit"] == pytest.approx(layer.max_logit.tolist(), abs=1e-4)
        assert set(found) == {"entropy", "first", "max_logit"}, "no row was empty or broken"


def test_rows_that_saw_nothing_or_broke_are_told() -> None:
    x = torch.zeros(1, 2, 4, 8)
    x[0, 1, 3] = torch.inf
    seen = Seen("Toy")
    layer = Layer("attn")
    mask = regard.masks.causal() & ~regard.masks.window(0)
    layer.take(regard.trace(x, x, x, mask=mask), 0, keep=False)
    seen._layers["attn"] = layer
    (summary,) = Atlas.of(seen).summaries
    found = summary.statistics()
    assert found["empty"] == [0.25, 0.25]
    assert found["broken"] == [0.0, 0.25]
    json.dumps(found, allow_nan=False)


def test_a_head_that_saw_nothing_at_all_has_no_largest_logit() -> None:
    x = torch.zeros(1, 1, 1, 8)
    layer = Layer("attn")
    layer.take(regard.trace(x, x, x, mask=~regard.masks.window(0)), 0, keep=False)
    seen = Seen("Toy")
    seen._layers["attn"] = layer
    (summary,) = Atlas.of(seen).summaries
    assert summary.statistics()["max_logit"] == [None]


def test_a_page_is_written(tmp_path: Path) -> None:
    index = index_of(page(watched(), tmp_path / "stats.html"))
    assert index["maps"] == []
    assert [layer["name"] for layer in index["summaries"]] == [
        f"layers.{i}.self_attn" for i in range(3)
    ]
    assert len(index["summaries"][0]["statistics"]["entropy"]) == 4


def test_layers_with_and_without_traces_are_both_there(tmp_path: Path) -> None:
    seen = seen_model(6)
    bare = Layer("bare")
    x = torch.randn(1, 3, 4, 8)
    bare.take(regard.trace(x, x, x), 0, keep=False)
    seen._layers["bare"] = bare
    index = index_of(page(seen, tmp_path / "both.html"))
    assert [m["name"] for m in index["maps"]] == ["layers.0", "layers.1", "layers.2"]
    assert [s["name"] for s in index["summaries"]] == ["bare"]


def test_the_app_and_the_widget_answer() -> None:
    seen = watched()
    with App(seen) as app:
        assert len(app.atlas.summaries) == 3
    _, body = Answers(Atlas.of(seen)).answer("index", {})
    assert json.loads(body)["summaries"][2]["heads"] == 4
    pytest.importorskip("anywidget")
    made = widget(seen)
    assert made.selection.layer == "layers.0.self_attn"
    made.view = {"map": 2, "head": 3}
    assert (made.selection.layer, made.selection.head) == ("layers.2.self_attn", 3)


@pytest.mark.parametrize(
    ("named", "got"),
    [
        ({"tokens": list("abc")}, "tokens="),
        ({"queries": ["a"]}, "queries="),
        ({"batch": 1}, "batch="),
    ],
)
def test_there_are_no_places_to_name(named: Any, got: str, tmp_path: Path) -> None:
    with pytest.raises(regard.RegardError, match="these are of all places together") as error:
        page(watched(), tmp_path / "p.html", **named)
    assert got in str(error.value)
    assert KEEP in str(error.value)


def test_nothing_seen_is_told(tmp_path: Path) -> None:
    with pytest.raises(regard.RegardError, match="no attention was seen") as error:
        page(Seen("Toy"), tmp_path / "p.html")
    assert "run the model while it is watched" in str(error.value)


def test_the_terminal_shows_the_largest_logit() -> None:
    seen = watched()
    text = drawn(head_grid(seen, numbers=True))
    assert re.match(r"entropy +sink +logit", text)
    assert "logit: the largest of the head" in text
    assert KEEP in text
    most = seen["layers.0.self_attn"].max_logit.tolist()
    row = next(line for line in text.splitlines() if line.startswith("0 "))
    assert row.split()[-4:] == [f"{v:.1f}" for v in most]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stats.regard"
    watched().save(path)
    return path


def invoke(*args: object) -> Any:
    return CliRunner().invoke(cli.app, ["view", *map(str, args)], env={"COLUMNS": "100"})


def test_the_command_shows_a_file_of_statistics(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made, png = tmp_path / "stats.html", tmp_path / "stats.png"
    result = invoke(file, "--terminal", "--page", made, "--picture", png)
    assert result.exit_code == 0, result.output
    assert "logit" in result.stdout
    assert "regard record --keep traces" in result.stdout
    assert index_of(made)["summaries"]
    assert png.stat().st_size > 1000


@pytest.mark.parametrize("option", ["--layer=0", "--head=1", "--token=a"])
def test_the_command_refuses_what_needs_weights(option: str, file: Path, tmp_path: Path) -> None:
    for where in (["--terminal"], ["--page", tmp_path / "x.html"]):
        result = invoke(file, *where, option)
        assert result.exit_code == 2, result.output
        assert "only statistics" in result.stderr
        assert "regard record --keep traces" in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "x.html").exists()


def test_the_app_of_the_command_begins_with_what_there_is(file: Path) -> None:
    subject = subject_of([str(file)])
    assert first_view(subject, subject.atlas(), ViewOptions()) == ""
    with pytest.raises(regard.RegardError, match="only statistics"):
        first_view(subject, subject.atlas(), ViewOptions(layer="0"))
    mixed = seen_model(6)
    layer = mixed._layers.pop("layers.0")
    layer.traces = []
    mixed._layers = {"layers.0": layer, **mixed._layers}
    subject = Subject(mixed, None, "", "")
    atlas = subject.atlas()
    assert atlas[0].name == "layers.1"
    assert first_view(subject, atlas, ViewOptions()) == ""
    assert first_view(subject, atlas, ViewOptions(layer="2", head="1")) == "map=1&head=1"
    with pytest.raises(regard.RegardError, match="--layer 0"):
        first_view(subject, atlas, ViewOptions(layer="0", head="1"))


def test_the_last_line_of_a_cell_says_how_to_keep_traces() -> None:
    seen = watched()
    text = seen._repr_mimebundle_()["text/html"]
    assert "logit" in text
    assert KEEP in html.unescape(text)
    assert notebook.shown(seen)._repr_html_() == text


def test_a_browser_shows_grids_and_the_table(open_page: Open, tmp_path: Path) -> None:
    seen = watched()
    tab = open_page(page(seen, tmp_path / "stats.html").as_uri())
    tab.wait_for_selector(".grid")
    assert tab.locator(".tabs button").all_inner_texts() == ["Grids", "Heads"]
    assert KEEP in tab.locator(".grids .note").first.inner_text()
    assert tab.locator(".grid h2").all_inner_texts() == ["Entropy", "On first", "Max logit"]
    cell = tab.locator(".grid").nth(2).locator("[data-map='1'][data-head='3']")
    assert cell.inner_text() == f"{float(seen['layers.1.self_attn'].max_logit[3]):.2f}"
    cell.click()
    assert tab.locator(".grid [aria-current]").count() == 3, "the head in every grid"
    tab.wait_for_timeout(300)
    assert tab.url.endswith("#map=1&head=3"), "of statistics, grids are the home"
    tab.get_by_role("button", name="Heads", exact=True).click()
    assert tab.locator("tbody tr").count() == 12
    assert tab.locator("tbody th button").count() == 0, "there is no map to jump to"


def test_the_app_reads_a_text_after_statistics(open_page: Open) -> None:
    with App(watched()) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(".grid")
        app.session.read({"text": "to be or not", "model": "spelling", "tokens": 0})
        app.session.work.wait()
        tab = open_page(app.url)
        tab.wait_for_selector(".said .word")
        assert tab.locator(".said .word").all_inner_texts() == ["to", "be", "or", "not"]
        tab.locator("[data-view=map]").click()
        tab.wait_for_selector("canvas.map[data-ready=yes]")
