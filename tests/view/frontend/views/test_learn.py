"""Learn, in a real browser: the tour with this text's numbers, and what the gallery opens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from regard.view.gallery import example
from regard.view.tour import tour
from regard.view.web import App
from regard.view.web import page as write_page
from tests.view.browser_page import Open, until
from tests.view.small_traces import seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")


def sums(tab: Page) -> str:
    return tab.locator(".tour .sum").inner_text()


def test_a_weight_is_followed_from_the_sentence_to_its_values(open_page: Open) -> None:
    with App(seen(12), tokens=tokens(12)) as app:
        tab = open_page(f"{app.url}#map=1&head=2")
        why = tab.get_by_role("button", name="Why ")
        why.wait_for()
        asked = int(tab.locator(".sentence").get_attribute("data-asked") or -1)
        told = why.inner_text()
        why.click()
        tab.wait_for_selector(".tour .sum")
        key = int(tab.evaluate("location.hash.match(/picked=\\d+%2C(\\d+)/)[1]"))
        wanted = tour(app.atlas[1], 2, asked, key)
        assert told.replace("\xa0", " ") == f"Why {round(100 * wanted['share'])} %?"
        titles = tab.locator(".steps button").all_inner_texts()
        assert titles == [f"{n + 1} {step['title']}" for n, step in enumerate(wanted["steps"])]
        for number, step in enumerate(wanted["steps"]):
            until(tab, f"document.querySelectorAll('.steps button')[{number}].ariaCurrent")
            assert sums(tab) == step["sum"]
            assert tab.locator(".tour .told > p").first.inner_text() == step["text"]
            assert tab.locator(".vector").count() == len(step.get("vectors", []))
            assert tab.locator(".told tbody tr").count() == len(
                step.get("table", {}).get("rows", [])
            )
            if number < 4:
                tab.get_by_role("button", name="Next →").click()
        assert tab.get_by_role("button", name="Next →").is_disabled()
        until(tab, "location.hash.includes('step=4')")
        tab.reload()
        tab.wait_for_selector(".vector")
        assert sums(tab) == wanted["steps"][4]["sum"]
        tab.get_by_role("button", name="Show it in the sentence").click()
        tab.wait_for_selector(f".sentence[data-asked='{asked}'][data-shown='1.2']")


def test_a_page_tells_of_one_pair(open_page: Open, tmp_path: Path) -> None:
    what = seen(12)
    made = write_page(what, tmp_path / "p.html", tokens=tokens(12), view="map=1&head=2&picked=7,3")
    tab = open_page(f"{made.as_uri()}#view=learn&step=3&map=1&head=2")
    tab.wait_for_selector(".tour .sum")
    weight = float(what["layers.1.attn"].trace.weights(heads=[2])[0, 0, 7, 3])
    assert sums(tab).replace("\xa0", " ").endswith(f"= {100 * weight:.3g} %")
    assert "A page tells this of one pair" in tab.locator(".tour").inner_text()
    tab.locator("[data-view=sentence]").click()
    tab.wait_for_selector(".caption strong")
    assert tab.get_by_role("button", name="Why ").count() == 0
    assert tab.locator(".gallery").count() == 0


def test_the_gallery_opens_the_head_and_says_what_to_look_at(open_page: Open) -> None:
    with App(seen(5), tokens=tokens(5)) as app:
        tab = open_page(f"{app.url}#view=learn")
        tab.locator("[data-example=spelling]").click()
        tab.wait_for_selector(".sentence[data-asked='13']")
        of = example("spelling")
        until(tab, "document.querySelector('.status')?.textContent.includes('reread')")
        assert tab.locator(".status").inner_text() == of.told()["says"]
        assert tab.locator("#regard-text").input_value() == of.text
        assert tab.locator("#regard-model").input_value() == "spelling"
        caption = tab.locator(".caption").inner_text().replace("\xa0", " ")
        assert f"‘reread’ looks most at ‘read’, {of.share} %" in caption
        tab.locator("[data-view=learn]").click()
        tab.locator("[data-example=patches]").click()
        until(tab, "document.querySelector('.regard').dataset.view === 'picture'")
        until(tab, "document.querySelector('.picture')?.textContent.includes('patch 2,9')")
        assert tab.locator(".status").inner_text() == example("patches").told()["says"]
