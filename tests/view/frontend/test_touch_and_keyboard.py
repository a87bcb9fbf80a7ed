"""Fingers, keys and the way round the app, in a real browser."""

from __future__ import annotations

import pytest

from tests.view.browser_page import MAP, Open, choose, spot, tip_weight, until

pytestmark = pytest.mark.xdist_group("browser")


def test_a_finger_reads_a_weight(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map", has_touch=True)
    plot = tab.locator(MAP)
    box = plot.bounding_box()
    assert box
    x, y = spot(plot, 30.5, 2.5, 40)
    tab.touchscreen.tap(box["x"] + x, box["y"] + y)
    assert tip_weight(tab.locator(".tip")) > 0
    tab.wait_for_timeout(200)
    assert tab.locator(".tip").is_visible()


def test_keys_are_heard_after_a_click_on_a_control(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    tab.wait_for_selector(MAP)
    choose(tab, "Log")
    tab.keyboard.press("]")
    until(tab, "document.querySelector('#regard-head').value === '1'")
    tab.keyboard.press("+")
    until(tab, "location.hash.includes('span=')")
    # Arrows choose another radio button, and do not move the map.
    before = tab.evaluate("new URLSearchParams(location.hash.slice(1)).get('query')")
    tab.keyboard.press("ArrowRight")
    until(tab, "!document.querySelector('input[type=radio][value=log]').checked")
    assert tab.evaluate("new URLSearchParams(location.hash.slice(1)).get('query')") == before
    tab.get_by_role("button", name="Zoom in").click()
    tab.keyboard.press("0")
    until(tab, "!location.hash.includes('span=')")
    # A number that is typed is no shortcut.
    tab.locator("#regard-layer").focus()
    tab.keyboard.press("]")
    assert tab.locator("#regard-head").input_value() == "1"


def test_zooming_out_ends_where_it_began(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    box = tab.locator(MAP).bounding_box()
    assert box
    picture = "document.querySelector('canvas.map').toDataURL()"
    tab.mouse.move(box["x"] + 400, box["y"] + 400)
    tab.keyboard.press("-")
    tab.keyboard.press("-")
    tab.mouse.move(0, 0)
    tab.wait_for_timeout(200)
    before = tab.evaluate(picture)
    for x, y in ((300, 500), (600, 300), (200, 200)):
        tab.mouse.move(box["x"] + x, box["y"] + y)
        for by in (-400, -400, 500, 500, 500):
            tab.mouse.wheel(0, by)
            tab.wait_for_timeout(30)
    tab.mouse.move(0, 0)
    until(tab, f"{picture} === {before!r}")


def test_the_first_step_of_the_cursor_is_on_a_pair_that_is_seen(
    open_page: Open, short_page: str
) -> None:
    for arrow in ("ArrowRight", "ArrowUp"):
        tab = open_page(f"{short_page}#view=map")
        tab.wait_for_selector(MAP)
        tab.locator("canvas.map").focus()
        tab.keyboard.press(f"Shift+{arrow}")
        until(tab, "location.hash.includes('picked=')")
        query, key = tab.evaluate(
            "new URLSearchParams(location.hash.slice(1)).get('picked').split(',').map(Number)"
        )
        assert key <= query
        assert tip_weight(tab.locator(".tip")) > 0


def test_there_is_a_heading_and_a_way_past_the_controls(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    tab.wait_for_selector(MAP)
    assert tab.locator("h1").all_inner_texts() == ["regard"]
    address = tab.evaluate("location.href")
    tab.keyboard.press("Tab")
    assert tab.locator(".skip:focus").is_visible()
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.className") == "map"
    assert tab.evaluate("location.href") == address
