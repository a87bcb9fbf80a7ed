"""What is still to come, and what nobody waits for any more, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from regard.seen import Seen
from regard.view.web import App
from tests.view.browser_page import MAP, Open, spot, until
from tests.view.small_traces import seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.xdist_group("browser")

PIXEL = """([x, y]) => {
    const canvas = document.querySelector('canvas.map')
    const at = canvas.getContext('2d').getImageData(x, y, 12, 12).data
    return new Set(Array.from({length: 144}, (_, i) => at.slice(4 * i, 4 * i + 3).join())).size
}"""


def held(tab: Page, pattern: str) -> list[Route]:
    """Requests that are not answered."""
    waiting: list[Route] = []
    tab.route(pattern, lambda route: waiting.append(route))
    return waiting


def asked(tab: Page, waiting: list[Route], many: int) -> None:
    for _ in range(600):
        if len(waiting) >= many:
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"{len(waiting)} requests of {many}")


def test_tiles_that_are_to_come_look_like_no_mask(open_page: Open, short: Seen) -> None:
    with App(short, tokens=tokens(40)) as app:
        tab = open_page(f"{app.url}#view=overview")
        tab.wait_for_selector(".thumb")
        waiting = held(tab, "**/tile?*map=1&head=3*")
        tab.goto(f"{tab.url.split('#')[0]}#view=map&map=1&head=3")
        until(tab, "document.querySelector('canvas.map')?.dataset.level === '0'")
        tab.wait_for_timeout(200)
        # Stripes: a spot of 12 × 12 pixels has more colours than one.
        assert tab.evaluate(PIXEL, spot(tab.locator("canvas.map"), 30, 2, 40)) > 1
        assert waiting
        tab.unroute("**/tile?*map=1&head=3*")
        tab.wait_for_selector(MAP)


def test_drafts_stay_until_all_in_view_is_exact(open_page: Open) -> None:
    with App(seen(4400, 1, 1, 1)) as app:
        tab = open_page("about:blank")
        tab.set_viewport_size({"width": 800, "height": 640})
        exact: list[Route] = []
        tab.route(
            "**/tile?*exact=1*",
            lambda route: exact.append(route) if exact or "row=1" in route.request.url
            else route.continue_(),
        )  # fmt: skip
        tab.goto(f"{app.url}#view=map")
        until(tab, "Number(document.querySelector('canvas.map')?.dataset.drafts) > 0")
        asked(tab, exact, 1)
        # The first was read in full, the second is on its way: both are drawn as drafts.
        tab.wait_for_timeout(300)
        drafts = tab.locator("canvas.map").get_attribute("data-drafts")
        assert drafts == "3"
        tab.close()


def test_tiles_that_went_out_of_sight_keep_no_one_waiting(open_page: Open) -> None:
    with App(seen(1100, 1, 1, 1)) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        waiting = held(tab, "**/tile?*")
        near = f"{tab.url.split('#')[0]}#view=map&query=800&key=500&span=600"
        tab.goto(near)
        asked(tab, waiting, 4)
        with tab.expect_event("requestfailed", lambda request: "tile" in request.url):
            tab.keyboard.press("0")
        tab.wait_for_selector(MAP)
        tab.unroute("**/tile?*")
        # Who comes back sees them: they are asked for again. (The address follows a moment later.)
        until(tab, "!location.hash.includes('span=600')")
        tab.goto(near)
        until(tab, "document.querySelector('canvas.map').dataset.level === '0'")
        tab.wait_for_selector(MAP)


def test_a_view_that_was_left_keeps_no_one_waiting(open_page: Open, short: Seen) -> None:
    with App(short, tokens=tokens(40)) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(".sentence[data-asked]")
        waiting = held(tab, "**/tile?*")
        tab.locator(".tabs [data-view=overview]").click()
        tab.wait_for_selector(".thumb")
        asked(tab, waiting, 4)
        # As many as are asked at once hang; the text is read all the same.
        tab.locator(".tabs [data-view=text]").click()
        tab.wait_for_selector(".text h2")
        until(tab, "document.querySelectorAll('.text .word').length > 0")
        tab.unroute("**/tile?*")
        # Who comes back sees all of them.
        tab.locator(".tabs [data-view=overview]").click()
        until(tab, "document.querySelectorAll('.thumb canvas[data-ready=yes]').length === 8")
        waiting = held(tab, "**/statistics?*")
        tab.locator(".tabs [data-view=heads]").click()
        asked(tab, waiting, 1)
        with tab.expect_event("requestfailed", lambda request: "statistics" in request.url):
            tab.locator(".tabs [data-view=map]").click()
        tab.unroute("**/statistics?*")
        tab.locator(".tabs [data-view=heads]").click()
        until(tab, "document.querySelectorAll('tbody tr').length === 8")
        # A click on the numbers of a row opens its map.
        tab.locator("tbody tr").nth(6).locator("td").nth(2).click()
        until(tab, "location.hash.includes('view=map&map=1&head=2')")


def test_few_stops_to_the_map_and_letters_that_can_be_hit(open_page: Open) -> None:
    words = ["to", " a", " city", " I", " b", "ank", " said", "."]
    with App(seen(8), tokens=words) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(".sentence[data-asked]")
        for place in (1, 3):
            box = tab.locator(f".said .word[data-place='{place}']").bounding_box()
            assert box
            for by in (-11, 11):
                x, y = box["x"] + box["width"] / 2 + by, box["y"] + box["height"] / 2
                hit = tab.evaluate(
                    "([x, y]) => document.elementFromPoint(x, y).closest('.word')?.dataset.place",
                    [x, y],
                )
                assert hit == str(place), (place, by)
        tab.locator(".tabs [data-view=map]").click()
        tab.wait_for_selector(MAP)
        tab.locator(".skip").focus()
        stops = 0
        while tab.evaluate("document.activeElement.tagName") != "CANVAS":
            tab.keyboard.press("Tab")
            stops += 1
            assert stops <= 9
        # Views are one stop, and arrow keys go from one to the next.
        tab.locator(".tabs [data-view=map]").focus()
        tab.keyboard.press("ArrowLeft")
        assert tab.evaluate("document.activeElement.dataset.view") == "sentence"
