"""Two heads, texts and models in a real browser: side by side, as a difference, in the address."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
import torch

from regard.commands.named_subject import subject_of
from regard.seen import Seen
from regard.view.atlas import Atlas
from regard.view.web import App
from tests.view.browser_page import Open, choose, until, weights
from tests.view.small_traces import seen, tokens
from tests.view.tiny_models import causal

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return causal(tmp_path_factory.mktemp("tiny"))


def elsewhere(one: torch.Tensor, other: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """Of each query, the share of attention that is not on the same token in both; n×n."""
    a, b = (list(places) for places in zip(*pairs, strict=True))
    both = torch.minimum(one[a][:, a], other[b][:, b]).sum(-1)
    return 1 - both


def compared(tab: Page, mean: float) -> None:
    """Wait until a mean is shown, within what 16 bits hold."""
    until(
        tab,
        "Math.abs(Number(document.querySelector('.compare')?.dataset.mean || NaN)"
        f" - {mean}) < 1e-3",
    )


def told(tab: Page, what: str) -> str:
    return tab.locator(f".compare {what}").first.inner_text().replace("\xa0", " ")


def percent(share: float) -> str:
    return f"{round(100 * share)} %" if share >= 0.01 else "<1 %"


def test_two_heads_and_layers_of_a_page(open_page: Open, short: Seen, short_page: str) -> None:
    same = [(at, at) for at in range(40)]
    tab = open_page(f"{short_page}#map=1&head=2")
    tab.get_by_role("button", name="Compare", exact=True).click()
    first, second = weights(short, 1, 2), weights(short, 1, 3)
    rows = elsewhere(first, second, same)
    compared(tab, float(rows.mean()))
    most = int(rows.argmax())
    assert told(tab, ".caption") == (
        f"Layer 1 · head 2 and layer 1 · head 3: on average {percent(float(rows.mean()))} of a "
        f"token’s attention goes elsewhere, most at ‘word{most}’ #{most}, "
        f"{percent(float(rows[most]))}."
    )
    # The grid tells of every head how far it is from the first.
    until(tab, "document.querySelectorAll('.far [data-far]').length === 8")
    for layer in (0, 1):
        for head in range(4):
            cell = tab.locator(".far .given button").nth(4 * layer + head)
            far = float(elsewhere(first, weights(short, layer, head), same).mean())
            assert abs(float(cell.get_attribute("data-far") or "nan") - far) < 1e-3, (layer, head)
    # A word that is pointed at in one text is asked about in both.
    tab.locator(".sides .word[data-place='30']").nth(1).hover()
    tab.wait_for_selector(".compare[data-asked='30,30']")
    moved = second[30] - first[30]
    key = int(moved.abs().argmax())
    change = f"‘word{key}’ {percent(float(first[30, key]))} → {percent(float(second[30, key]))}"
    assert told(tab, ".moves").startswith(f"‘word30’ #30: {change}")
    tab.locator(".sides .word[data-place='30']").nth(0).click()
    until(tab, "location.hash.includes('picked=30')")
    tab.locator(".far .given button").nth(1).click()
    compared(tab, float(elsewhere(first, weights(short, 0, 1), same).mean()))
    assert "map2=0&head2=1" in tab.evaluate("location.hash")
    # The same head of another layer; as a difference; and Back leads through all of it.
    tab.locator("#regard-head2").select_option("2")
    third = weights(short, 0, 2)
    compared(tab, float(elsewhere(first, third, same).mean()))
    choose(tab, "Difference")
    tab.wait_for_selector(".compare .more")
    change = float((third - first)[30].abs().max())
    strongest = int((third - first)[30].abs().argmax())
    sign = "+" if third[30, strongest] > first[30, strongest] else "−"
    word = tab.locator(f".sides .word[data-place='{strongest}']").first
    assert (word.get_attribute("data-share") or "").replace("\xa0", " ") == (
        f"{sign}{percent(change)}"
    )
    assert tab.locator("figure").inner_text().replace("\xa0", " ") == (
        f"Second less first, ±{percent(float((third - first).abs().max()))}"
    )
    tab.go_back()
    tab.wait_for_selector("figure >> nth=1")
    tab.go_back()
    compared(tab, float(elsewhere(first, weights(short, 0, 1), same).mean()))
    # Who is sent the address sees the same.
    again = open_page(tab.url)
    compared(again, float(elsewhere(first, weights(short, 0, 1), same).mean()))


def test_two_texts_and_two_models_in_the_app(open_page: Open, tiny: str) -> None:
    text, other = "the red ball is here", "the red and blue ball is here"
    subject, beside = (subject_of([each], tiny) for each in (text, other))
    one, two = (each.atlas()[1] for each in (subject, beside))
    names, theirs = list(one.keys or ()), list(two.keys or ())
    start = next(at for at, pair in enumerate(zip(names, theirs, strict=False)) if len({*pair}) > 1)
    longer = len(theirs) - len(names)
    assert names[start:] == theirs[start + longer :]
    pairs = [(at, at if at < start else at + longer) for at in range(len(names))]

    def head(atlas: Atlas, at: int) -> torch.Tensor:
        n = atlas[1].shape[1]
        return atlas[1].weights(at, range(n), range(n))

    with App(subject.atlas(), told=subject.told, reader=subject.reader) as app:
        tab = open_page(f"{app.url}#view=compare&map=1&head=3")
        box = tab.get_by_role("textbox", name="Other text")
        box.fill(other)
        box.press("Enter")
        rows = elsewhere(head(subject.atlas(), 3), head(beside.atlas(), 3), pairs)
        compared(tab, float(rows.mean()))
        assert told(tab, ".caption").startswith("Layer 1 · head 3 in both: ")
        until(tab, "document.querySelectorAll('.far [data-far]').length === 8")
        for at in range(4):
            cell = tab.locator(".far .given button").nth(4 + at)
            rows = elsewhere(head(subject.atlas(), at), head(beside.atlas(), at), pairs)
            far = float(cell.get_attribute("data-far") or "nan")
            assert abs(far - float(rows.mean())) < 1e-3
        # The text that is shown is still the one it was, and the other lives in the address.
        assert app.session.now.number == 1
        assert f"other={quote(other).replace('%20', '+')}" in tab.evaluate("location.hash")
        again = open_page(app.url + tab.evaluate("location.hash"))
        compared(again, float(tab.locator(".compare").get_attribute("data-mean") or "nan"))
        assert app.session.work.state()["number"] == 1
        # Another model: words that are compared by their spelling.
        box.fill("")
        tab.get_by_label("Other model").select_option("spelling")
        until(tab, "location.hash.includes('by=spelling')")
        until(tab, "document.querySelector('.compare .caption').textContent.includes('and head 0')")
        assert "spelling" in told(tab, "h3 >> nth=1")
        tab.go_back()
        until(tab, "document.querySelector('.compare .caption').textContent.includes('in both')")


def test_what_is_chosen_stands_in_one_line_of_a_small_screen(open_page: Open) -> None:
    subject = subject_of(None, "regard-small")
    with App(subject.atlas(), told=subject.told, reader=subject.reader) as app:
        tab = open_page("about:blank")
        tab.set_viewport_size({"width": 1024, "height": 768})
        tab.goto(f"{app.url}#view=compare&map=4&head=5")
        tab.wait_for_selector(".second button")
        middles = tab.evaluate(
            """() => [...document.querySelectorAll('.compare .ask :is(select, input, button)')]
                .map(each => each.getBoundingClientRect()).filter(box => box.width > 4)
                .map(box => Math.round((box.top + box.bottom) / 2))"""
        )
        assert len(middles) >= 5
        assert max(middles) - min(middles) <= 4


def test_a_text_that_cannot_be_read_is_said_and_the_view_stays(open_page: Open, tiny: str) -> None:
    subject = subject_of(["the red ball"], tiny)
    with App(subject.atlas(), told=subject.told, reader=subject.reader) as app:
        tab = open_page(f"{app.url}#view=compare&other={quote('red ' * 200)}")
        until(tab, "document.querySelector('.compare > .note')?.textContent.includes('compared: ')")
        tab.get_by_role("button", name="Sentence", exact=True).click()
        tab.wait_for_selector(".sentence[data-asked]")


def test_long_texts_are_compared_by_their_cells(open_page: Open) -> None:
    what = seen(600, 1, 2, 1)
    with App(what, tokens=tokens(600)) as app:
        tab = open_page(f"{app.url}#view=compare")
        tab.wait_for_selector(".compare[data-asked]")
        # Cells of 4 × 4 pairs: means over queries of what falls on four keys together.
        pooled = [weights(what, 0, head).view(150, 4, 150, 4).sum(-1).mean(1) for head in (0, 1)]
        compared(tab, float((pooled[0] - pooled[1]).abs().sum(-1).mean() / 2))
        assert ": on average about " in told(tab, ".caption")


def test_what_is_read_beside_replaces_nothing(tiny: str) -> None:
    subject = subject_of(["the red ball"], tiny)
    with App(subject.atlas(), told=subject.told, reader=subject.reader) as app:
        session = app.session
        number = session.beside({"text": "the blue ball", "model": "", "edition": "1"})
        assert session.work.wait(60)
        assert (session.now.number, number) == (1, 2)
        assert session.edition("2") is not None
        # The same is not read again; a text of one's own takes the next number.
        assert session.beside({"text": "the blue ball"}) == 2
        session.read({"text": "the ball", "model": "spelling", "tokens": 0})
        assert session.work.wait(60)
        assert (session.now.number, session.now.told.text) == (3, "the ball")
        assert json.loads(json.dumps(session.about("2")))["text"] == "the blue ball"
