"""The home in a real browser: words, what they look at, what heads do, and what links views."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import regard
from regard.commands.first_view import first_view
from regard.commands.named_subject import subject_of
from regard.view.atlas import Atlas
from regard.view.subjects import ViewOptions
from regard.view.web import App
from regard.view.web import page as write_page
from tests.view.browser_page import MAP, Open, until, weights
from tests.view.frontend.views.test_head_badges import WORDS, plain
from tests.view.small_traces import seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def plain_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_page(plain(), tmp_path_factory.mktemp("page") / "p.html", tokens=WORDS).as_uri()


def caption(tab: Page) -> str:
    return tab.locator(".caption").inner_text().replace("\xa0", " ")


def asked(tab: Page, word: int, head: str) -> None:
    """Wait until a word is asked about in a head."""
    told = f".sentence[data-asked='{word}'][data-shown='{head}']"
    tab.wait_for_selector(told)


def test_a_newcomer_reads_what_a_head_does(open_page: Open) -> None:
    subject = subject_of(None, "regard-small")
    atlas = subject.atlas()
    names = list(atlas[0].keys or ())
    with App(atlas, told=subject.told) as app:
        tab = open_page(f"{app.url}#{first_view(subject, atlas, ViewOptions())}")
        tab.set_viewport_size({"width": 1440, "height": 900})
        until(tab, "document.querySelectorAll('.head[data-badge]').length === 64")
        chosen = tab.locator(".head[aria-pressed=true]")
        assert chosen.get_attribute("aria-label") == "Layer 4 · head 5, induction"
        # Everything is on one screen: nothing has to be scrolled.
        assert tab.evaluate(
            """['.room', '.about', '.stage'].every(name => {
                const box = document.querySelector(name)
                return box.scrollHeight <= box.clientHeight + 1
            })"""
        )
        assert float(tab.evaluate("parseFloat(getComputedStyle(document.querySelector("
                                  "'.said .word')).fontSize)")) >= 24  # fmt: skip
        for name in (" ball", " took", " red"):
            last = len(names) - 1 - names[::-1].index(name)
            tab.locator(f".said .word[data-place='{last}']").hover()
            asked(tab, last, "4.5")
            p = atlas[4].weights(5, range(last, last + 1), range(len(names)))[0]
            told = caption(tab)
            assert told.startswith("Layer 4 · head 5 · induction: ")
            assert f"‘{name.strip()}’" in told
            # The first token is no answer, and what it takes is said.
            key = 1 + int(p[1:].argmax())
            share = f"{round(100 * float(p[key]))} %"
            assert share in told or "rests on the first token" in told, told
        assert told == (
            "Layer 4 · head 5 · induction: ‘red’ looks at what followed ‘red’ before: "
            f"‘ball’, {share}"
        )
        note = tab.locator(".answer .note").inner_text().replace("\xa0", " ")
        assert f"{round(100 * float(p[0]))} % rests on the first token" in note
        assert "looks at what followed the same token before" in tab.locator(".kinds").inner_text()


def test_words_heads_and_pins_in_the_page_and_the_app(open_page: Open, plain_page: str) -> None:
    with App(plain(), tokens=WORDS) as app:
        for address in (plain_page, app.url):
            tab = open_page(address)
            tab.wait_for_selector(".head[data-badge=induction]")
            cells = tab.locator(".badges .head").all()
            assert [cell.get_attribute("data-badge") for cell in cells] == [
                "previous",
                "induction",
                "broad",
            ]
            tab.locator(".said .word[data-place='8']").hover()
            asked(tab, 8, "0.0")
            assert caption(tab) == (
                "Head 0 · previous: ‘c’ looks at the token just before: ‘b’, 100 %"
            )
            assert tab.locator(".arcs path").count() == 1
            # A head that is pointed at is shown on the same word, and gone when it is left.
            cells[1].hover()
            asked(tab, 8, "0.1")
            assert caption(tab) == (
                "Head 1 · induction: ‘c’ looks at what followed ‘c’ before: ‘.’, 100 %"
            )
            tab.locator(".brand").hover()
            asked(tab, 8, "0.0")
            cells[1].click()
            until(tab, "location.hash.includes('head=1')")
            assert cells[1].get_attribute("aria-pressed") == "true"
            tab.locator(".said .word[data-place='7']").click()
            until(tab, "location.hash.includes('picked=7%2C2')")
            tab.locator(".said .word[data-place='12']").hover()
            asked(tab, 7, "0.1")
            assert tab.locator(".word.pinned").get_attribute("data-place") == "7"


def test_a_pair_is_picked_everywhere_and_back_leads_back(open_page: Open, plain_page: str) -> None:
    tab = open_page(f"{plain_page}#head=1")
    tab.wait_for_selector(".sentence[data-asked]")
    tab.locator(".said .word[data-place='11']").click()
    until(tab, "location.hash.includes('picked=11%2C6')")
    tab.get_by_role("button", name="Map", exact=True).click()
    tab.wait_for_selector(MAP)
    assert "picked=11%2C6" in tab.evaluate("location.hash")
    # Another pair is picked on the map; the sentence holds it.
    tab.locator("canvas.map").focus()
    tab.keyboard.press("Shift+ArrowUp")
    until(tab, "!location.hash.includes('picked=11%2C6')")
    query, key = tab.evaluate("new URLSearchParams(location.hash.slice(1)).get('picked')").split(
        ","
    )
    tab.keyboard.press("Enter")
    asked(tab, int(query), "0.1")
    assert tab.locator(".word.pinned").get_attribute("data-place") == query
    assert tab.locator(".word.held").get_attribute("data-place") == key
    tab.locator("[data-view=text]").click()
    until(tab, f"document.querySelector('h2').textContent.includes('#{query} looks')")
    # Back: the sentence, the map, the sentence that was pinned, and before it was.
    tab.go_back()
    tab.wait_for_selector(".word.pinned")
    tab.go_back()
    tab.wait_for_selector(MAP)
    tab.go_back()
    tab.wait_for_selector(".word.pinned[data-place='11']")
    tab.go_back()
    until(tab, "document.querySelector('.sentence') && !document.querySelector('.word.pinned')")
    assert tab.evaluate("location.hash") == "#head=1"
    tab.go_forward()
    tab.wait_for_selector(".word.pinned[data-place='11']")


def test_the_keyboard_moves_pins_and_lets_go(open_page: Open, plain_page: str) -> None:
    tab = open_page(plain_page)
    tab.wait_for_selector(".sentence[data-asked]")
    tab.locator(".said .word[data-place='4']").focus()
    tab.keyboard.press("ArrowRight")
    asked(tab, 5, "0.0")
    tab.keyboard.press("Enter")
    until(tab, "location.hash.includes('picked=5%2C4')")
    tab.keyboard.press("ArrowLeft")
    until(tab, "location.hash.includes('picked=4%2C3')")
    tab.keyboard.press("Escape")
    until(tab, "!location.hash.includes('picked')")
    assert tab.locator(".word.pinned").count() == 0
    assert tab.locator(".said .word[tabindex='0']").count() == 1
    # Heads as well: arrow keys show them, Enter chooses.
    tab.locator(".badges .head").first.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_selector(".sentence[data-shown='0.1']")
    tab.keyboard.press("Enter")
    until(tab, "location.hash.includes('head=1')")


def test_a_finger_pins(open_page: Open, plain_page: str) -> None:
    tab = open_page(plain_page, has_touch=True)
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.wait_for_selector(".sentence[data-asked]")
    tab.locator(".said .word[data-place='9']").tap()
    tab.wait_for_selector(".word.pinned[data-place='9']")
    assert "‘.’ looks at the token just before: ‘c’" in caption(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    tabs = "[...document.querySelectorAll('.tabs button')]"
    assert tab.evaluate(f"{tabs}.every(tab => tab.scrollWidth <= tab.clientWidth)")


def test_a_long_text_is_a_passage_whose_answer_stays_in_sight(open_page: Open) -> None:
    what = seen(600)
    with App(what, tokens=tokens(600)) as app:
        tab = open_page(f"{app.url}#map=1&head=2")
        tab.wait_for_selector(".sentence[data-asked='60']")
        far = tab.locator(".said .word[data-place='350']")
        far.scroll_into_view_if_needed()
        assert tab.evaluate("document.querySelector('.room').scrollTop") > 100
        far.hover()
        asked(tab, 350, "1.2")
        # Layers of hundreds of words would make each hover slow.
        positioned = "w => getComputedStyle(w).position !== 'static' && !w.dataset.share"
        assert tab.evaluate(f"[...document.querySelectorAll('.word')].filter({positioned})") == []
        p = weights(what, 1, 2)[350]
        key = 1 + int(p[1:].argmax())
        assert f"‘word{key}’, {round(100 * float(p[key]))} %" in caption(tab)
        box = tab.locator(".answer").bounding_box()
        assert box
        assert box["y"] + box["height"] <= 800
        until(tab, "document.querySelectorAll('.head[data-badge]').length === 8")
        # Colours of long maps are logarithms, those of short ones the weight itself.
        tab.get_by_role("button", name="Map", exact=True).click()
        tab.wait_for_selector(MAP)
        assert tab.get_by_role("radio", name="Log").is_checked()


def test_what_is_too_long_to_read_begins_with_the_map(open_page: Open) -> None:
    with App(seen(5001, 1, 1, 1), tokens=tokens(5001)) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(MAP)
        # What is a draft is read in full while nobody looks any more.
        tab.close()


def test_a_text_of_many_words_is_turned_like_pages(open_page: Open) -> None:
    with App(seen(900, 1, 1, 1), tokens=tokens(900)) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(".head[data-badge]")
        assert "0–399 of 900" in tab.locator(".sentence .turn").inner_text()
        for _ in range(2):
            tab.get_by_role("button", name="Later →").click()
        tab.locator(".said .word[data-place='899']").hover()
        asked(tab, 899, "0.0")


def test_arcs_begin_at_the_word_wherever_it_stands(open_page: Open, tmp_path: Path) -> None:
    path = write_page(seen(200, 1, 1, 1), tmp_path / "p.html", tokens=tokens(200))
    tab = open_page(path.as_uri())
    for place in (3, 120, 190):
        tab.locator(f".said .word[data-place='{place}']").hover()
        asked(tab, place, "0.0")
        until(tab, "document.querySelectorAll('.arcs path').length > 0")
        start, word = tab.evaluate(
            """place => {
                const box = of => document.querySelector(of).getBoundingClientRect()
                const word = box(`[data-place='${place}']`)
                const path = document.querySelector('.arcs path').getPointAtLength(0)
                return [box('.arcs').left + path.x, word.x + word.width / 2]
            }""",
            place,
        )
        assert abs(start - word) < 1
    # Some words at a time are a layer, so that a hover draws few of them again.
    assert 1 < tab.locator(".said .part").count() < 20


def test_one_text_that_looks_at_another(open_page: Open, tmp_path: Path) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    t = regard.trace(3 * q, k, k)
    source = ["Die", " Katze", " sa", "ß", " hier", "."]
    asks = ["The", " cat", " sat", "."]
    atlas = Atlas.of(t, tokens=source, queries=asks)
    tab = open_page(write_page(atlas, tmp_path / "p.html").as_uri())
    tab.locator(".said[data-side=query] .word[data-place='1']").hover()
    asked(tab, 1, "0.0")
    p = t.weights()[0, 0, 1]
    best = source[int(p.argmax())].strip()
    assert f"‘cat’ looks most at ‘{best}’, {round(100 * float(p.max()))} %" in caption(tab)
    # A word of the other text makes a pair with the one that is asked about.
    tab.locator(".said[data-side=key] .word[data-place='5']").click()
    until(tab, "location.hash.includes('picked=1%2C5')")


def test_colours_of_a_short_text_are_linear(open_page: Open, plain_page: str) -> None:
    tab = open_page(f"{plain_page}#view=map")
    tab.wait_for_selector(MAP)
    assert tab.get_by_role("radio", name="Linear").is_checked()
