"""What a notebook is given when a trace is the last line of a cell."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.view.atlas import Atlas
from regard.view.web import notebook
from tests.view.small_traces import HOSTILE, seen, tokens

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook without anywidget."""
    monkeypatch.setattr(notebook, "installed", lambda: False)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkout without the front end."""
    monkeypatch.setattr(notebook, "BUNDLE", tmp_path / "regard.js")


def inside(text: str) -> str:
    """The page in a frame."""
    found = re.search(r'<iframe srcdoc="([^"]*)"', text)
    assert found
    return html.unescape(found[1])


def test_with_anywidget_a_trace_is_a_widget() -> None:
    pytest.importorskip("anywidget")
    what = seen(6)
    for each in (what, what["layers.0.attn"].trace):
        found = each._repr_mimebundle_()
        assert set(found) == {WIDGET, "text/plain"}
        assert found["text/plain"] == repr(each)
        assert type(each._display_()).__name__ == "AttentionWidget"


@pytest.mark.usefixtures("bare")
def test_without_anywidget_it_is_a_page_in_a_frame() -> None:
    what = seen(20)
    what.tokens = tokens(20)
    found = what._repr_mimebundle_(include=None, exclude=None)
    assert set(found) == {"text/html", "text/plain"}
    page = inside(found["text/html"])
    assert page.count('id="regard-0"') == page.count('id="regard-1"') == 1
    assert " word19" in page
    assert "layers are shown" not in found["text/html"]
    assert what._display_()._repr_html_() == found["text/html"]


@pytest.mark.usefixtures("bare")
def test_what_is_embedded_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    what = seen(20, layers=5)
    monkeypatch.setattr(notebook, "MOST_PAIRS", 3 * 4 * 20 * 20)
    text = what._repr_mimebundle_()["text/html"]
    assert 'id="regard-2"' in inside(text)
    assert 'id="regard-3"' not in inside(text)
    assert "3 of 5 layers are shown here" in text
    assert "pip install 'regard[notebook]'" in text
    monkeypatch.setattr(notebook, "MOST_PAIRS", 1 << 26)
    monkeypatch.setattr(notebook, "MOST_BYTES", 2 * 2 * 4 * 20 * 20)
    # Causal maps take about half of their pairs, of two bytes each.
    assert len(notebook.fitting(Atlas.of(what)).maps) == 3


@pytest.mark.usefixtures("bare")
def test_of_a_long_text_there_is_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 1, 9000, 4)
    long = regard.trace(x, x, x, mask=masks.causal() & masks.window(8))

    def walked(*_: object, **how: object) -> None:
        raise AssertionError("walked all pairs of a long text")

    monkeypatch.setattr(notebook, "document", walked)
    monkeypatch.setattr(regard.Trace, "map", walked)
    text = long._repr_mimebundle_()["text/html"]
    assert "A map of this text would take long here" in text
    assert "sink" in text


@pytest.mark.usefixtures("unbuilt")
def test_without_the_front_end_it_is_what_a_terminal_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *what: shown.append(what))
    what = seen(6)
    what.tokens = HOSTILE[:6]
    text = what._repr_mimebundle_()["text/html"]
    assert "rows look at columns" in text
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not shown, "shown twice"


def test_statistics_alone_are_a_grid() -> None:
    model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model) as what:
        assert what._repr_mimebundle_() == {"text/plain": "Seen(nothing yet)"}
        model(torch.randn(1, 3, 16))
    found = what._repr_mimebundle_()
    assert set(found) == {"text/html", "text/plain"}
    assert "entropy" in found["text/html"]
    assert "<iframe" not in found["text/html"]


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4)])
def test_nothing_is_text(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    t = regard.trace(x, x, x)
    assert t._repr_mimebundle_() == {"text/plain": repr(t)}
    assert t._display_() == repr(t)


def test_ipython_in_a_terminal_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(display_formatter=SimpleNamespace(active_types=["text/plain"]))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    what = seen(5)
    assert what._repr_mimebundle_() == {"text/plain": repr(what)}


@pytest.mark.usefixtures("bare")
def test_the_frame_works_in_a_browser(tmp_path: Path, browser: Any) -> None:
    what = seen(12)
    what.tokens = HOSTILE
    cell = tmp_path / "cell.html"
    cell.write_text(what._repr_mimebundle_()["text/html"], "utf-8")
    complaints: list[str] = []
    with browser.new_page(viewport={"width": 1000, "height": 700}) as tab:
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(cell.as_uri())
        frame = tab.frame_locator("iframe")
        frame.locator(".said .word").first.wait_for()
        frame.get_by_role("button", name="Map", exact=True).click()
        frame.locator("canvas.map[data-ready=yes]").wait_for()
        frame.locator("#regard-head").select_option("2")
        frame.get_by_role("button", name="Text", exact=True).click()
        frame.locator(".word.self").wait_for()
        # Longer than it takes to write an address, which a frame without one must not.
        tab.wait_for_timeout(300)
    assert complaints == []
