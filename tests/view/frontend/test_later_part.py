"""The views that are opened from the home come when one of them is, in every place there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.view.web import App, page
from tests.view.browser_page import MAP, Open
from tests.view.small_traces import seen, tokens


def test_the_app_loads_the_later_part_when_a_view_is_opened(open_page: Open) -> None:
    with App(seen(6), tokens(6)) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(".sentence .word")
        asked = "performance.getEntriesByType('resource').map(one => one.name.split('/').pop())"
        assert "later.js" not in tab.evaluate(asked)
        tab.click("[data-view=map]")
        tab.wait_for_selector(MAP)
        assert "later.js" in tab.evaluate(asked)


def test_a_page_runs_the_later_part_when_a_view_is_opened(open_page: Open, tmp_path: Path) -> None:
    tab = open_page(page(seen(6), tmp_path / "p.html", tokens(6)).as_uri())
    tab.wait_for_selector(".sentence .word")
    assert tab.evaluate("typeof regardLater") == "undefined"
    tab.click("[data-view=heads]")
    tab.wait_for_selector(".heads table")
    assert tab.evaluate("typeof regardLater") == "function"


def test_a_view_that_does_not_come_says_so_and_comes_the_next_time(open_page: Open) -> None:
    with App(seen(6), tokens(6)) as app:
        tab = open_page(app.url)
        tab.wait_for_selector(".sentence .word")

        def fails(route: Any) -> None:
            route.fulfill(body="throw new Error('half a file')", content_type="text/javascript")

        tab.route("**/later.js", fails)
        tab.click("[data-view=map]")
        tab.wait_for_selector("text=This view could not be opened: Error: half a file")
        tab.unroute("**/later.js")
        # A module that failed is not fetched again under the same address.
        tab.reload()
        tab.click("[data-view=map]")
        tab.wait_for_selector(MAP)


def test_a_pair_is_shown_on_the_map_before_the_map_was_ever_open(open_page: Open) -> None:
    with App(seen(6), tokens(6)) as app:
        tab = open_page(f"{app.url}#picked=4,2")
        tab.click("text=Show this pair on the map")
        tab.wait_for_selector(f"{MAP} ~ .tip[data-weight]")
