"""The widget: what a kernel answers over a comm, and the front end on top of it in a browser."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.view.atlas.tiles import CancelledError, decoded
from regard.view.web import widget
from regard.view.web.atlas_queries import Answers
from tests.view.browser_page import spot
from tests.view.small_traces import seen, tokens
from tests.view.text_drawings import seen_model

pytest.importorskip("anywidget")
from regard.view.web.widget_model import Selection
from tests.view.widget_comm import PATIENCE, wires

__all__ = ["wires"]
pytestmark = pytest.mark.usefixtures("wires")


def test_a_kernel_answers_with_buffers() -> None:
    what = seen(12)
    made = widget(what, tokens=tokens(12))
    made.comm.ask("a-7", "tile", map=1, head=2, level=0, row=0, column=0)
    content, (body,) = made.comm.heard()
    assert content == {"number": "a-7"}
    exact = what["layers.1.attn"].trace.weights(heads=[2])[0, 0]
    torch.testing.assert_close(decoded(body).mean, exact, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"name": "tile", "asked": {}}, "without 'map'"),
        ({"name": "secrets", "asked": {}}, "no such question"),
        ({"name": "row", "asked": {"map": "x", "heads": 0, "query": 0}}, "cannot be read"),
        ({"name": "row"}, "asked"),
        ({"name": "row", "asked": 3}, "items"),
    ],
)
def test_a_question_that_makes_no_sense_gets_an_error(wrong: dict[str, Any], why: str) -> None:
    made = widget(seen(5))
    made.comm.give(method="custom", content={"number": "a-1", **wrong})
    content, buffers = made.comm.heard()
    assert content["number"] == "a-1"
    assert why in content["error"]
    assert not buffers


def test_what_goes_wrong_is_told_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Answers, asked: object, go: Any) -> bytes:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(Answers.QUESTIONS, "tile", broken)
    made = widget(seen(5))
    made.comm.ask("a-1", "secrets")
    assert "no such question" in made.comm.heard()[0]["error"]
    assert not caplog.records, "what is refused needs no traceback"
    made.comm.ask("a-2", "tile")
    assert made.comm.heard()[0] == {"number": "a-2", "error": "out of memory"}
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("regard.view.web.widget_model", "ERROR")
    assert "in broken\n" in caplog.text, "where it was raised"


def endless(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Tiles are never done: when one was begun, and when it was given up."""
    started, stopped = threading.Event(), threading.Event()

    def tile(self: Answers, asked: object, go: Any) -> bytes:
        started.set()
        while go(0.5):
            pass
        stopped.set()
        raise CancelledError

    monkeypatch.setitem(Answers.QUESTIONS, "tile", tile)
    return started, stopped


def test_a_long_answer_holds_nothing_up_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    started, stopped = endless(monkeypatch)
    made = widget(seen(5))
    made.comm.ask("a-1", "tile")
    assert started.wait(PATIENCE)
    made.comm.ask("a-2", "visible", map=0)
    assert made.comm.heard()[0] == {"number": "a-2"}
    assert not stopped.is_set()
    made.comm.give(method="custom", content={"number": "a-1", "stop": True})
    assert stopped.wait(PATIENCE)
    assert made.comm.sent.empty()


def test_closing_stops_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    started, stopped = endless(monkeypatch)
    made = widget(seen(5))
    made.comm.ask("a-1", "tile")
    assert started.wait(PATIENCE)
    made.close()
    assert stopped.wait(PATIENCE)


def test_what_is_picked_comes_back() -> None:
    made = widget(seen(9), tokens=tokens(9))
    assert made.selection == Selection("layers.0.attn", 0)
    told = []
    made.observe(lambda change: told.append(change.new), "selection")

    def look(**view: Any) -> None:
        made.comm.give(method="update", state={"view": view})

    look(view="map", map=1, head=3, picked=[8, 2])
    assert made.selection == Selection("layers.1.attn", 3, query=8, key=2)
    look(view="map", map=1, head=3, picked=[8, 2], span=4.5)
    look(view="text", map=1, head=3, picked=[8, 2], token=5, direction="looks")
    assert made.selection == Selection("layers.1.attn", 3, query=5)
    look(view="text", map=1, head=3, picked=[8, 2], token=5, direction="seen")
    assert made.selection == Selection("layers.1.attn", 3, key=5)
    assert len(told) == 3, "panning picks nothing"


def test_nobody_else_picks() -> None:
    import traitlets

    with pytest.raises(traitlets.TraitError, match="read-only"):
        widget(seen(5)).selection = Selection("layers.0.attn", 1)


def test_without_anywidget_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module, which in its package goes by the name of its function.
    monkeypatch.setattr(sys.modules[widget.__module__], "find_spec", lambda name: None)
    with pytest.raises(regard.RegardError, match=r"pip install 'regard\[notebook\]'"):
        widget(seen(5))


HOST = """async ([program, view, places]) => {
  const url = URL.createObjectURL(new Blob([program], { type: "text/javascript" }));
  const { default: made } = await import(url);
  const state = { view, height: 500 };
  const calls = { "msg:custom": [], "change:view": [] };
  const tell = (data) => window.kernel(JSON.stringify(data));
  window.model = {
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; },
    save_changes: () => tell({ method: "update", state: { view: state.view } }),
    on: (event, call) => { calls[event].push(call); },
    off: () => {},
    send: async (content) => {
      const [answer, text] = JSON.parse(await tell({ method: "custom", content }));
      const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
      for (const call of calls["msg:custom"]) call(answer, [new DataView(bytes.buffer)]);
    },
    move: (value) => { state.view = value; for (const call of calls["change:view"]) call(); },
  };
  for (let i = 0; i < places; i++) {
    const place = document.createElement("div");
    document.body.append(place);
    made.render({ model: window.model, el: place });
  }
}"""


def kernel(made: Any, numbers: list[str]) -> Callable[[str], str]:
    """What answers the host: the widget, to whose questions numbers are given."""

    def answered(text: str) -> str:
        data = json.loads(text)
        made.comm.give(**data)
        if data["method"] == "update" or "stop" in data["content"]:
            return '[{}, ""]'
        numbers.append(data["content"]["number"])
        answer, buffers = made.comm.heard()
        return json.dumps([answer, base64.b64encode(b"".join(buffers)).decode()])

    return answered


def test_statistics_alone_are_grids(browser: Any) -> None:
    made = widget(seen_model(6, keep="statistics"))
    complaints: list[str] = []
    with browser.new_page(viewport={"width": 1000, "height": 1100}) as tab:
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.expose_function("kernel", kernel(made, []))
        tab.evaluate(HOST, [made._esm, {}, 1])
        tab.locator(".grid").nth(2).locator("[data-map='2'][data-head='1']").click()
        tab.wait_for_timeout(300)
        assert made.selection == Selection("layers.2", 1)
        tab.evaluate("(view) => window.model.move(view)", {**made.view, "view": "heads"})
        tab.locator("tbody tr").nth(11).wait_for()
    assert complaints == []


def test_the_front_end_runs_on_a_kernel(browser: Any) -> None:
    made = widget(seen(30), tokens=tokens(30))
    numbers: list[str] = []
    complaints: list[str] = []
    with browser.new_page(viewport={"width": 1000, "height": 1100}) as tab:
        tab.set_default_timeout(60_000)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.expose_function("kernel", kernel(made, numbers))
        # Shown twice, as a notebook may: both hear all answers.
        tab.evaluate(HOST, [made._esm, {"map": 1}, 2])
        for sentence in tab.locator(".sentence").all():
            sentence.and_(tab.locator("[data-asked]")).wait_for()
        assert tab.locator(".sentence").count() == 2
        tab.locator(".sentence").first.locator(".word[data-place='17']").click()
        tab.wait_for_timeout(300)
        row = made._answers.atlas[1].weights(0, range(17, 18), range(30))[0]
        key = 1 + int(row[1:].argmax())
        assert made.selection == Selection("layers.1.attn", 0, query=17, key=key)
        tab.evaluate("window.model.move({ map: 1, view: 'map', picked: [] })")
        tab.locator("canvas.map").nth(1).wait_for()
        for map in tab.locator("canvas.map").all():
            map.and_(tab.locator("[data-ready=yes]")).wait_for()
        assert tab.locator("canvas.map").count() == 2
        assert tab.locator("#regard-layer").first.input_value() == "1"
        tab.locator("#regard-head").first.select_option("2")
        tab.wait_for_timeout(300)
        assert made.selection == Selection("layers.1.attn", 2)
        x, y = spot(tab.locator("canvas.map").first, 20.5, 4.5, 30)
        tab.locator("canvas.map").first.click(position={"x": x, "y": y})
        tab.wait_for_timeout(300)
        assert made.selection == Selection("layers.1.attn", 2, query=20, key=4)
        tab.evaluate("window.model.move({ map: 0, head: 3, view: 'text', token: 9 })")
        tab.locator(".word.self").first.wait_for()
        assert "word9" in tab.locator(".regard h2").first.inner_text()
        assert "head 3" in tab.locator(".regard h2").first.inner_text()
    assert complaints == []
    assert len(set(numbers)) == len(numbers), "one took an answer to the other for its own"
