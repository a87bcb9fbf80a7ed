"""The map, in a real browser: search, strongest pairs, minimap, numbers, and where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.seen import Seen
from regard.view.atlas import Atlas
from regard.view.web import App, page
from tests.view.browser_page import MAP, Open, hover, spot, tip_weight, until, weights
from tests.view.small_traces import seen, tokens

pytestmark = pytest.mark.xdist_group("browser")
N = 40


def test_strongest_pairs_are_those_of_the_weights(short: Seen) -> None:
    (query, key, weight), *rest = Atlas.of(short)[1].strongest_pairs(2, 5, first=1)
    dense = weights(short, 1, 2)
    dense[:, 0] = 0
    best = dense.max(1)
    assert (query, key) == divmod(int(dense.argmax()), N)
    assert [weight, *(w for _, _, w in rest)] == pytest.approx(
        best.values.topk(5).values.tolist(), rel=1e-4
    )
    assert all(best.indices[q] == k for q, k, _ in rest)


@pytest.mark.parametrize("place", ["app", "page"])
def test_a_click_on_a_strong_pair_shows_it(
    place: str, short: Seen, short_page: str, open_page: Open
) -> None:
    with App(short, tokens(N)) as app:
        tab = open_page(f"{app.url if place == 'app' else short_page}#view=map&map=1&head=2")
        pairs = tab.locator(".pairs li button")
        pairs.first.wait_for()
        dense = weights(short, 1, 2)
        dense[:, 0] = 0
        query, key = divmod(int(dense.argmax()), N)
        assert pairs.count() == 6
        assert pairs.first.get_attribute("data-pair") == f"{query},{key}"
        pairs.first.click()
        assert tip_weight(tab.locator(".tip")) == pytest.approx(float(dense[query, key]), rel=2e-3)
        assert pairs.first.get_attribute("aria-pressed") == "true"
        until(tab, f"location.hash.includes('picked={query}%2C{key}')")


def test_a_page_of_a_long_text_knows_its_strongest_pairs(open_page: Open, tmp_path: Path) -> None:
    what = seen(300, layers=1, heads=2)
    url = page(what, tmp_path / "p.html", tokens(300), limit=1).as_uri()
    tab = open_page(f"{url}#view=map")
    tab.locator(".pairs li button").first.wait_for()
    found = [button.get_attribute("data-pair") for button in tab.locator(".pairs li button").all()]
    exact = Atlas.of(what)[0].strongest_pairs(0, 6, first=1)
    assert found[0] == f"{exact[0][0]},{exact[0][1]}"


def test_a_token_is_found_and_shown(open_page: Open) -> None:
    n = 300
    names = [" the" if i % 100 == 7 else f" word{i}" for i in range(n)]
    names[200:202] = [" ele", "phant"]
    with App(seen(n, layers=1), names) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        tab.keyboard.press("/")
        tab.keyboard.type("The")
        told = tab.locator(".find .note")
        assert told.inner_text() == "1 of 3: the #7"
        tab.keyboard.press("Enter")
        assert told.inner_text() == "2 of 3: the #107"
        # It is near enough to be named, and inside of what is seen.
        until(tab, "/query=(9|10|11)\\d/.test(location.hash)")
        tab.keyboard.press("Shift+Enter")
        assert told.inner_text() == "1 of 3: the #7"
        tab.locator("#regard-find").fill("elephant")
        assert told.inner_text() == "1 of 1: elephant #200"
        assert not tab.get_by_role("button", name="Next").is_visible()
        tab.locator("#regard-find").fill("zebra")
        assert told.inner_text() == "Not in this text."
        tab.keyboard.press("Escape")
        assert not told.is_visible()
        assert tab.locator("#regard-find").input_value() == ""


def test_the_minimap_is_there_when_something_is_out_of_sight(open_page: Open) -> None:
    with App(seen(120, layers=1), tokens(120)) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        small = tab.locator(".minimap")
        assert not small.is_visible()
        for _ in range(4):
            tab.get_by_role("button", name="Zoom in").click()
        small.wait_for()
        box = small.bounding_box()
        assert box
        tab.mouse.click(box["x"] + 0.25 * box["width"], box["y"] + 0.75 * box["height"])
        until(tab, "/query=(8[89]|9[012])/.test(location.hash)")
        until(tab, "/key=(2[89]|3[012])/.test(location.hash)")
        assert "Seen of it: queries" in (small.get_attribute("aria-label") or "")
        tab.get_by_role("button", name="Whole text").click()
        small.wait_for(state="hidden")


def test_numbers_stand_in_cells_that_are_large_enough(open_page: Open) -> None:
    what = seen(8, layers=1)
    with App(what, tokens(8)) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        worth = int((weights(what, 0, 0) >= 0.005).sum())
        until(tab, f"document.querySelector('canvas.map').dataset.numbers === '{worth}'")
    with App(seen(120, layers=1), tokens(120)) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        assert tab.locator(MAP).get_attribute("data-numbers") == "0"


def test_a_map_smaller_than_its_room_stands_in_the_middle(open_page: Open) -> None:
    what = seen(6, layers=1)
    with App(what, tokens(6)) as app:
        tab = open_page(f"{app.url}#view=map")
        plot = tab.wait_for_selector(MAP)
        assert plot is not None
        box = plot.bounding_box()
        assert box
        x, y = spot(tab.locator(MAP), 3, 3, 6)
        assert x == pytest.approx((box["width"] + 112 - 8) / 2)
        assert y == pytest.approx((box["height"] + 96 - 8) / 2)
        assert tip_weight(hover(tab, 5, 2, 6)) == pytest.approx(
            float(weights(what, 0, 0)[5, 2]), rel=1e-3
        )
