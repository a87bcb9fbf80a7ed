"""What the model says, in a real browser: the likeliest tokens, what if, and how it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from regard.models import load
from regard.view.subjects import run
from regard.view.web import App
from tests.view import tiny_models
from tests.view.browser_page import MAP, Open, until
from tests.view.small_traces import seen

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")
TEXT = "the cat sat on the mat and the cat"
WIDE = "document.querySelectorAll('.bars tbody tr').length === 10"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("models")
    name = tiny_models.causal(folder / "causal")
    reader = load(name)
    found = run(reader, TEXT, 0, lambda *_: None)
    with App(found.atlas(name), told=found.told(reader, TEXT), reader=reader) as running:
        running.session.models[tiny_models.translator(folder / "translator")] = "translates"
        yield running


def shares(tab: Page) -> list[list[str]]:
    rows = tab.locator(".bars tbody tr").all()
    return [row.locator(".number").all_inner_texts() for row in rows]


def test_what_if_heads_and_edges_are_off(open_page: Open, app: App) -> None:
    tab = open_page(f"{app.url}#view=map&map=1&head=2&picked=4,1")
    until(tab, WIDE)
    before = shares(tab)
    assert all(len(row) == 1 for row in before)
    told = json.loads(bytes(app.session.now.says.answer("prediction", {"at": "4"})[1]))
    likeliest = f"{100 * told['tokens'][0]['before']['probability']:.3g}%"
    assert before[0] == [likeliest]
    assert tab.locator(".following").inner_text().startswith("The text has")
    tab.get_by_role("button", name="Layer 1 · head 2", exact=True).click()
    until(tab, "document.querySelectorAll('.bars.compared .share.after').length === 10")
    assert all(len(row) == 3 for row in shares(tab))
    tab.locator(".offers").get_by_role("button", name="→").first.click()
    tab.get_by_role("button", name="Layer 1 · all heads", exact=True).click()
    until(tab, "document.querySelectorAll('.chip').length === 3")
    assert tab.get_by_role("button", name="Layer 1 · head 2", exact=True).is_disabled()
    # A chip is taken away by a click on it, and all of them by one.
    tab.get_by_role("button", name="Switch on: Layer 1 · all heads").click()
    until(tab, "document.querySelectorAll('.chip').length === 2")
    tab.get_by_role("button", name="All on").click()
    until(tab, "!document.querySelector('.bars.compared') && !document.querySelector('.chip')")
    assert shares(tab) == before
    # Another place, by its own buttons and by what is picked elsewhere.
    tab.get_by_role("button", name="The token after").click()
    until(tab, "document.querySelector('.spot .place').textContent.includes('#5')")
    tab.locator("[data-view=text]").click()
    tab.locator(".word").nth(2).click()
    until(tab, "document.querySelector('.spot .place').textContent.includes('#2')")


def test_a_head_is_chosen_by_what_it_gives(open_page: Open, app: App) -> None:
    tab = open_page(app.url)
    tab.wait_for_selector(".given button")
    assert tab.locator(".given button").count() == 8
    tab.locator(".given button").nth(6).click()
    until(tab, "document.querySelector('#regard-head').value === '2'")
    assert tab.locator("#regard-layer").input_value() == "1"
    switches = tab.get_by_role("group", name="Switch off")
    assert switches.get_by_role("button", name="Layer 1 · head 2", exact=True).is_enabled()
    until(tab, "document.activeElement.getAttribute('aria-label')?.startsWith('Layer 1 · head 2')")
    tab.keyboard.press("ArrowUp")
    assert (tab.locator(":focus").get_attribute("aria-label") or "").startswith("Layer 0 · head 2")
    assert "Layer 0 · head 2" in tab.locator(".parts .note").inner_text()


def test_the_text_goes_on_and_stops(open_page: Open, app: App) -> None:
    tab = open_page(app.url)
    until(tab, WIDE)
    tab.get_by_label("Continue for", exact=True).fill("30")
    tab.get_by_label("seed").fill("3")
    reader = app.session._reader
    assert reader is not None
    hook = reader.model.register_forward_hook(lambda *_: time.sleep(0.3))
    go = tab.locator(".goes-on button")
    go.click()
    until(tab, "document.querySelectorAll('.written span').length > 2")
    assert go.inner_text() == "Stop"
    go.click()
    until(tab, "/Stopped after \\d+ tokens/.test(document.querySelector('.goes-on').textContent)")
    hook.remove()
    assert tab.locator(".written span").count() < 30
    assert go.inner_text() == "Go on"
    tab.get_by_label("Continue for", exact=True).fill("3000")
    go.click()
    assert tab.evaluate("document.activeElement.validity.rangeOverflow")
    assert go.inner_text() == "Go on"


def test_a_translator_has_no_parts_and_says_so(open_page: Open, app: App) -> None:
    tab = open_page(app.url)
    until(tab, WIDE)
    tab.locator("#regard-model").select_option(list(app.session.models)[-1])
    tab.get_by_role("button", name="Read").click()
    until(tab, "document.querySelector('.parts .note')?.textContent.includes('cannot be told')")
    until(tab, WIDE)


def test_nothing_is_shown_where_no_model_read(open_page: Open) -> None:
    with App(seen(8)) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(MAP)
        assert tab.locator(".says").is_hidden()


def test_it_closes_and_stays_closed(open_page: Open, app: App) -> None:
    tab = open_page(f"{app.url}#view=map")
    until(tab, WIDE)
    opener = tab.get_by_role("button", name="What the model says")
    wide = tab.locator(MAP).bounding_box()
    opener.click()
    assert tab.locator(".bars").is_hidden()
    until(tab, f"document.querySelector('canvas.map').clientWidth > {wide and wide['width']} + 200")
    tab.reload()
    tab.wait_for_selector(".says.closed")
    opener.click()
    until(tab, WIDE)


def test_the_bundled_model_says_less_often_what_its_head_copies(open_page: Open) -> None:
    reader = load("regard-small", device="cpu")
    text = "Tom had a red ball and a blue box. Tom put the red ball in the blue box. The red"
    found = run(reader, text, 0, lambda *_: None)
    with App(found.atlas(reader.name), told=found.told(reader, text), reader=reader) as app:
        tab = open_page(f"{app.url}#map=4&head=5")
        tab.wait_for_selector(".given button")
        tab.locator(".offers button").first.click()
        tab.wait_for_selector(".bars.compared")
        assert "‘ball’" in tab.locator(".moved").inner_text()
