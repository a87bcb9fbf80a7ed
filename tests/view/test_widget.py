"""The widget: what a kernel answers, and the front end on top of it in a real browser."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from typing import Any

import pytest
import torch

import regard
from regard.view.tiles import decoded
from regard.view.widget import widget
from tests.view.toys import seen, tokens

pytest.importorskip("anywidget")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

Sent = list[tuple[dict[str, Any], list[bytes]]]


def listening(made: Any, monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent: Sent = []

    def send(content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        sent.append((content, buffers or []))

    monkeypatch.setattr(made, "send", send)
    return sent


def test_a_kernel_answers_with_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    what = seen(12)
    made = widget(what, tokens=tokens(12))
    sent = listening(made, monkeypatch)
    place = {"map": 1, "head": 2, "level": 0, "row": 0, "column": 0}
    made.answered(made, {"number": 7, "name": "tile", "asked": place}, [])
    ((content, (body,)),) = sent
    assert content == {"number": 7}
    exact = what["layers.1.attn"].trace.weights(heads=[2])[0, 0]
    torch.testing.assert_close(decoded(body).mean, exact, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 1, "name": "tile", "asked": {}},
        {"number": 1, "name": "secrets", "asked": {}},
        {"number": 1, "name": "row", "asked": {"map": "x", "heads": 0, "query": 0}},
        {"number": 1, "name": "row"},
        {"number": 1, "name": "row", "asked": 3},
    ],
)
def test_a_question_that_makes_no_sense_gets_an_error(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = widget(seen(5))
    sent = listening(made, monkeypatch)
    made.answered(made, wrong, [])
    ((content, buffers),) = sent
    assert content["number"] == 1
    assert content["error"]
    assert not buffers


def test_without_anywidget_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module, which in its package goes by the name of its function.
    monkeypatch.setattr(sys.modules[widget.__module__], "find_spec", lambda name: None)
    with pytest.raises(regard.RegardError, match=r"pip install regard\[notebook\]"):
        widget(seen(5))


HOST = """async ([program, view]) => {
  const url = URL.createObjectURL(new Blob([program], { type: "text/javascript" }));
  const { default: made } = await import(url);
  const state = { view, height: 500 };
  const calls = {};
  window.model = {
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; },
    save_changes: () => {},
    on: (event, call) => { (calls[event] ??= []).push(call); },
    off: () => {},
    send: async (content) => {
      const [answer, text] = JSON.parse(await window.kernel(JSON.stringify(content)));
      const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
      for (const call of calls["msg:custom"]) call(answer, [new DataView(bytes.buffer)]);
    },
    move: (value) => { state.view = value; for (const call of calls["change:view"]) call(); },
  };
  const place = document.createElement("div");
  document.body.append(place);
  made.render({ model: window.model, el: place });
}"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
def test_the_front_end_runs_on_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made = widget(seen(30), tokens=tokens(30))
    sent = listening(made, monkeypatch)

    def kernel(content: str) -> str:
        made.answered(made, json.loads(content), [])
        answer, buffers = sent.pop()
        return json.dumps([answer, base64.b64encode(b"".join(buffers)).decode()])

    complaints: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1000, "height": 700})
        tab.set_default_timeout(10_000)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.expose_function("kernel", kernel)
        tab.evaluate(HOST, [made._esm, {"map": 1}])
        tab.wait_for_selector("canvas.map[data-ready=yes]")
        assert tab.locator("#regard-layer").input_value() == "1"
        tab.locator("#regard-head").select_option("2")
        tab.wait_for_timeout(300)
        assert tab.evaluate("window.model.get('view').head") == 2
        tab.evaluate("window.model.move({ map: 0, head: 3, view: 'text', token: 9 })")
        tab.wait_for_selector(".word.self")
        assert "word9" in tab.locator(".regard h2").inner_text()
        assert "head 3" in tab.locator(".regard h2").inner_text()
        browser.close()
    assert complaints == []
