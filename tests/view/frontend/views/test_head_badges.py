"""What heads do, as the app and the page tell it: one word each, and nobody waits for it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

import regard
from regard import masks
from regard.cancellation import step
from regard.seen import Layer, Seen
from regard.view.atlas import Atlas, CancelledError, head_badges
from regard.view.web import App, atlas_queries
from regard.view.web.atlas_queries import Answers
from regard.view.web.html_page import page
from tests.view.browser_page import Open, until
from tests.view.small_traces import seen, tokens
from tests.view.web.test_html_page import parts

WORDS = [" a", " b", " c", ".", " d", " e", " a", " b", " c", ".", " d", " e", " a", " b", " c"]


def plain() -> Seen:
    """A head for each of three words: it looks at one key of each row by what it is told."""
    n = len(WORDS)
    looks = torch.zeros(3, n, n)
    for q in range(n):
        looks[0, q, max(q - 1, 0)] = 1
        copies = [k + 1 for k in range(q) if WORDS[k] == WORDS[q]]
        looks[1, q, copies[-1] if copies else 0] = 1
    q, k = 40 * looks[None], torch.eye(n).expand(1, 3, n, n)
    found = Seen("Plain")
    name = "model.decoder.layers.0.self_attention"
    layer = Layer(name)
    layer.take(regard.trace(q, k, k, mask=masks.causal(), scale=1.0), 0, 0, keep=True)
    found._layers[name] = layer
    return found


def test_heads_are_told_by_the_app_and_in_the_page(tmp_path: Path) -> None:
    atlas = Atlas.of(plain(), tokens=WORDS)
    told = ["previous", "induction", "broad"]
    assert head_badges(atlas[0]) == told
    kind, body = Answers(atlas).answer("badges", {"map": "0"})
    assert (kind, json.loads(body)) == ("application/json", told)
    (index, _) = parts(page(atlas, tmp_path / "p.html"))
    assert index["maps"][0]["page"]["badges"] == told


@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize("where", ["app", "page"])
def test_the_table_tells_what_heads_do(open_page: Open, tmp_path: Path, where: str) -> None:
    atlas = Atlas.of(plain(), tokens=WORDS)
    written = page(atlas, tmp_path / "p.html").as_uri()
    with App(atlas) as app:
        tab = open_page(f"{app.url if where == 'app' else written}#view=heads")
        until(tab, "document.querySelectorAll('tbody .badge').length === 3")
        assert tab.locator("tbody .badge").all_inner_texts() == ["previous", "induction", "broad"]
        # On a phone a name stands in one line.
        tab.set_viewport_size({"width": 390, "height": 844})
        lines = "[...document.querySelectorAll('.jump')].map(jump => jump.clientHeight)"
        assert max(tab.evaluate(lines)) < 36


def test_where_one_text_looks_at_another_nothing_is_before() -> None:
    other = [f" w{i}" for i in range(len(WORDS))]
    atlas = Atlas.of(plain(), tokens=WORDS, queries=other)
    assert head_badges(atlas[0]) == ["", "", "broad"]


def test_a_text_that_is_too_long_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.view.atlas.badges.LONGEST", 11)
    assert head_badges(Atlas.of(seen(12), tokens=tokens(12))[0]) is None


def test_what_nobody_waits_for_gives_way_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered = threading.Event(), threading.Event()

    def long(_: object) -> list[str]:
        begun.set()
        late = time.monotonic() + 3
        while not answered.is_set() and time.monotonic() < late:
            step()
        return ["first"] if answered.is_set() else ["nobody else was answered meanwhile"]

    monkeypatch.setattr(atlas_queries, "head_badges", long)
    answers = Answers(Atlas.of(seen(12)))
    found: list[bytes] = []
    background = threading.Thread(
        target=lambda: found.append(answers.answer("badges", {"map": "0"})[1]), daemon=True
    )
    background.start()
    assert begun.wait(10)
    answers.answer("cell", {"map": "0", "head": "0", "query": "3", "key": "1"})
    answered.set()
    background.join(10)
    assert found == [b'["first"]']


def test_who_no_longer_listens_stops_it() -> None:
    with pytest.raises(CancelledError):
        Answers(Atlas.of(seen(12))).answer("badges", {"map": "0"}, lambda: False)
