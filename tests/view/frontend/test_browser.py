"""The page and the app in a real browser, which may reach nothing but the loopback."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import pytest
import torch

from regard.seen import Seen
from regard.view.web import App
from regard.view.web import page as write_page
from regard.view.web.redirect_file import RedirectFile
from tests.view.browser_page import MAP, Open, choose, contrast, hover, tip_weight, until, weights
from tests.view.small_traces import HOSTILE, seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# One browser serves all of them.
pytestmark = pytest.mark.xdist_group("browser")


def test_the_tooltip_of_a_page_tells_the_exact_weight(
    open_page: Open, short_page: str, short: Seen
) -> None:
    tab = open_page(f"{short_page}#view=map&map=1&head=2")
    p = weights(short, 1, 2)
    for query, key in ((30, 7), (39, 39), (12, 0)):
        tip = hover(tab, query, key, 40)
        until(tab, f"document.querySelector('.tip').textContent.includes('#{query}')")
        assert tip_weight(tip) == pytest.approx(p[query, key].item(), rel=2e-3, abs=1e-6)
        rank = 1 + int((p[query] > p[query, key]).sum())
        assert f"rank {rank}" in tip.inner_text()
        assert f"word{query}" in tip.inner_text()
    assert "masked" in _settled(hover(tab, 3, 30, 40))


def _settled(tip: Locator) -> str:
    tip.page.wait_for_timeout(200)
    return tip.inner_text()


def test_the_tooltip_of_the_app_tells_the_exact_weight(open_page: Open) -> None:
    what = seen(1500)
    with App(what, tokens=tokens(1500)) as app:
        tab = open_page(f"{app.url}#view=map&map=0&head=1")
        tab.wait_for_selector(MAP)
        tip = hover(tab, 1200, 250, 1500)
        found = tip_weight(tip)
        words = tip.inner_text()
        query, key = (int(part.split()[0]) for part in words.replace("\n", " ").split("#")[1:3])
        assert found == pytest.approx(weights(what, 0, 1)[query, key].item(), rel=1e-4, abs=1e-9)
        assert "in this cell of 4 × 4 pairs" in words


def test_a_file_leads_to_the_app_and_the_secret_stays_behind(open_page: Open) -> None:
    with App(seen(20)) as app:
        file = RedirectFile(f"{app.url}#map=1&head=2")
        tab = open_page(file.path.as_uri())
        tab.wait_for_selector(MAP)
        file.remove()
        assert tab.url == f"{app.room}#map=1&head=2"
        assert app.secret not in tab.content()
        tab.reload()
        tab.wait_for_selector(MAP)
        (cookie,) = tab.context.cookies(app.room)
        assert f"{cookie['name']}={cookie['value']}" == app.cookie
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        # Other servers of this machine are not sent it, as far as they do not know the room.
        assert tab.context.cookies(f"http://127.0.0.1:{app.port}/") == []
        assert tab.evaluate("document.cookie") == ""


def test_zoom_pan_and_the_address(open_page: Open) -> None:
    with App(seen(1500), tokens=tokens(1500)) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        assert tab.locator(MAP).get_attribute("data-level") == "2"
        wide = tab.locator(MAP).evaluate("canvas => canvas.clientWidth")
        hover(tab, 1000, 100, 1500)
        for _ in range(12):
            tab.mouse.wheel(0, -300)
        # Until the wheel goes no nearer: the keys beside the labels are 64 pixels wide.
        span = "Number(new URLSearchParams(location.hash.slice(1)).get('span'))"
        until(tab, f"Math.abs({span} - ({wide} - 120) / 64) < 0.01")
        tab.wait_for_selector("canvas.map[data-level='0'][data-ready=yes]")
        near = tab.evaluate("location.hash")
        # What the pointer was on stays under it.
        found = parse_qsl(urlsplit(near).fragment)
        middle = {name: float(part) for name, part in found if name != "view"}
        assert abs(middle["query"] - 1000) < 20
        assert abs(middle["key"] - 100) < 20
        tab.locator("canvas.map").focus()
        tab.keyboard.press("ArrowRight")
        until(tab, f"location.hash !== {near!r}")
        moved = tab.evaluate("location.hash")
        again = open_page(app.url + moved)
        again.wait_for_selector("canvas.map[data-level='0'][data-ready=yes]")
        again.wait_for_timeout(300)
        assert again.evaluate("location.hash") == moved
        tab.keyboard.press("0")
        tab.wait_for_selector("canvas.map[data-level='2'][data-ready=yes]")
        until(tab, "!location.hash.includes('span=')")


def test_heads_layers_pooling_and_colours_without_fetching_again(open_page: Open) -> None:
    with App(seen(1500), tokens=tokens(1500)) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        pictures = {_pixels(tab)}
        for name in ("Mean", "Sum", "Max"):
            choose(tab, name, exact=True)
        choose(tab, "Linear")
        tab.wait_for_timeout(200)
        pictures.add(_pixels(tab))
        assert not [url for url in asked if "tile" in url]
        choose(tab, "Row")
        tab.wait_for_timeout(400)
        pictures.add(_pixels(tab))
        choose(tab, "Ratio")
        tab.wait_for_timeout(400)
        pictures.add(_pixels(tab))
        assert not [url for url in asked if "tile" in url]
        assert len(pictures) == 4
        tab.locator("#regard-head").select_option("3")
        tab.locator("#regard-layer").select_option("1")
        until(tab, "location.hash.includes('head=3') && location.hash.includes('map=1')")
        tab.locator("canvas.map").focus()
        tab.keyboard.press("]")
        until(tab, "!location.hash.includes('head=')")
        assert [url for url in asked if "tile" in url]
        choose(tab, "Weight × value")
        tab.wait_for_selector(MAP)


def _pixels(tab: Page) -> str:
    return str(tab.evaluate("document.querySelector('canvas.map').toDataURL()"))


def test_text_tells_where_a_token_looks(open_page: Open, short_page: str, short: Seen) -> None:
    tab = open_page(f"{short_page}#view=text&token=30&head=1")
    row = weights(short, 0, 1)[30]
    first = tab.locator(".strongest li").first
    first.wait_for()
    assert f"#{int(row.argmax())}" in first.inner_text()
    choose(tab, "Is seen by")
    until(tab, "document.querySelector('h2').textContent.includes('is seen by')")
    column = weights(short, 0, 1)[:, 30]
    assert f"#{int(column.argmax())}" in tab.locator(".strongest li").first.inner_text()
    tab.locator(".word[data-place='5']").click()
    until(tab, "location.hash.includes('token=5')")
    tab.get_by_role("button", name="all", exact=True).click()
    until(tab, "document.querySelector('h2').textContent.includes('mean of 4 heads')")
    mean = torch.stack([weights(short, 0, h)[:, 5] for h in range(4)]).mean(0)
    assert f"#{int(mean.argmax())}" in tab.locator(".strongest li").first.inner_text()
    tab.locator(".strongest button").first.click()
    tab.wait_for_selector(MAP)


def test_heads_are_sorted_filtered_saved_and_opened(
    open_page: Open, short_page: str, short: Seen
) -> None:
    tab = open_page(f"{short_page}#view=heads")
    tab.wait_for_selector("tbody tr")
    assert tab.locator("tbody tr").count() == 8
    tab.get_by_role("button", name="Entropy").click()
    cells = tab.locator("tbody tr td:nth-of-type(1)").all_inner_texts()
    assert [float(c) for c in cells] == sorted(map(float, cells), reverse=True)
    assert tab.locator("th[aria-sort=descending]").inner_text().startswith("Entropy")
    with tab.expect_download() as waiting:
        tab.get_by_role("button", name="Save CSV").click()
    saved = Path(waiting.value.path()).read_text().splitlines()
    assert saved[0] == "layer,head,entropy,first,self,previous,max_logit"
    exact = short["layers.1.attn"].trace.weights()[0, 2, :, 0].mean()
    (line,) = [line for line in saved if line.startswith('"layers.1.attn",2,')]
    assert float(line.split(",")[3]) == pytest.approx(exact.item(), abs=1e-4)
    tab.locator("#regard-kind").select_option("sink")
    assert "of 8 heads" in tab.locator(".ask").inner_text()
    tab.locator("#regard-kind").select_option("all")
    tab.locator(".jump").nth(2).click()
    tab.wait_for_selector(MAP)


def test_the_names_of_figures_stay_in_sight(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=heads")
    tab.wait_for_selector("tbody tr")
    tab.set_viewport_size({"width": 1000, "height": 250})
    tab.evaluate("document.querySelector('.regard').style.minHeight = 0")
    tab.locator("tbody tr").last.scroll_into_view_if_needed()

    def top(what: str) -> float:
        box = tab.locator(what).first.bounding_box()
        assert box
        return box["y"]

    assert top("tbody tr") < top(".stage") == pytest.approx(top("thead th"), abs=1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_stand_out(open_page: Open, short_page: str, scheme: str) -> None:
    """Edges of what can be pressed differ three to one from what is behind, as WCAG 1.4.11 asks."""
    tab = open_page(f"{short_page}#view=map", color_scheme=scheme)
    tab.wait_for_selector(MAP)
    for control in ("#regard-head", ".choice span >> nth=1", ".buttons button >> nth=0"):
        edge, behind = tab.locator(control).first.evaluate(
            """it => {
                const behind = it.closest('.side') ?? it.closest('.regard')
                const [edge, ground] = [it, behind].map(each => getComputedStyle(each))
                return [edge.borderTopColor, ground.backgroundColor]
            }"""
        )
        assert contrast(edge, behind) >= 3, (control, edge, behind)


def test_the_overview_draws_every_head(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=overview")
    until(tab, "document.querySelectorAll('.thumb canvas[data-ready=yes]').length === 8")
    assert tab.locator("[aria-current=true]").get_attribute("aria-label") == "Layer 0 · head 0"
    tab.get_by_role("button", name="Layer 1 · head 3").click()
    tab.wait_for_selector(MAP)
    assert tab.evaluate("document.querySelector('#regard-head').value") == "3"


def test_hostile_tokens_are_text(open_page: Open, tmp_path: Path) -> None:
    n = len(HOSTILE)
    url = write_page(seen(n), tmp_path / "p.html", tokens=HOSTILE).as_uri()
    with App(seen(n), tokens=HOSTILE) as app:
        for address in (url, app.url):
            tab = open_page(f"{address}#view=text")
            tab.wait_for_selector(".word")
            words = tab.locator(".word").all_inner_texts()
            assert len(words) == n
            assert words[0] == "<script>alert(1)</script>"
            assert words[6] == "nul␀nul"
            assert words[5].endswith("…")
            assert "\\u202e" in words[3]
            assert tab.locator("img").count() == 0
            tab.get_by_role("button", name="Map").click()
            tip = hover(tab, n - 1, 1, n)
            tip_weight(tip)
            assert "<img src=x" in tip.inner_text()


def test_dark_mode_narrow_windows_and_no_overflow(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map", color_scheme="dark")
    tab.wait_for_selector(MAP)
    assert tab.locator(".regard").get_attribute("data-theme") == "dark"
    tab.get_by_role("button", name="Light or dark").click()
    assert tab.locator(".regard").get_attribute("data-theme") == "light"
    for width in (360, 700, 1600):
        tab.set_viewport_size({"width": width, "height": 740})
        for view in ("sentence", "overview", "text", "heads", "map"):
            tab.locator(f"[data-view={view}]").last.click()
            tab.wait_for_timeout(60)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (width, view)
        tip_weight(hover(tab, 20, 5, 40))


def test_menus_stay_inside_of_the_window(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    for width in (340, 900):
        tab.set_viewport_size({"width": width, "height": 740})
        for view in ("overview", "text", "map"):
            tab.locator(f"[data-view={view}]").last.click()
            tab.get_by_role("button", name="Save …").click()
            box = tab.get_by_role("menu").bounding_box()
            assert box
            assert box["x"] >= 0, (width, view)
            assert box["x"] + box["width"] <= width, (width, view)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (width, view)
            tab.keyboard.press("Escape")


def test_what_was_chosen_keeps_the_focus(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=text&token=9")
    tab.get_by_role("radio", name="Looks at").focus()
    tab.keyboard.press("ArrowRight")
    until(tab, "document.querySelector('h2').textContent.includes('is seen by')")
    assert tab.evaluate("document.activeElement.value") == "seen"
    tab.locator(".set [data-head='2']").press("Enter")
    until(tab, "document.querySelector('h2').textContent.includes('mean of 2 heads')")
    assert tab.evaluate("document.activeElement.dataset.head") == "2"
    tab.locator("[data-view=heads]").click()
    tab.get_by_role("button", name="Entropy").press("Enter")
    assert tab.locator("th[aria-sort=descending]").inner_text().startswith("Entropy")
    tab.keyboard.press("Enter")
    assert tab.locator("th[aria-sort=ascending]").inner_text().startswith("Entropy")


def test_it_can_be_used_without_a_pointer(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    tab.wait_for_selector(MAP)
    unnamed = tab.evaluate(
        """[...document.querySelectorAll('button, select, input, canvas[tabindex]')].filter(
          e => !(e.getAttribute('aria-label') || (e.closest('label') ?? e).textContent.trim())
        ).length"""
    )
    assert unnamed == 0
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the view"
    # The views are one stop, at the one that is shown; arrow keys go from one to the next.
    for key, view in (("Tab", "Map"), ("ArrowLeft", "Sentence"), ("ArrowRight", "Map")):
        tab.keyboard.press(key)
        assert tab.evaluate("document.activeElement.textContent") == view
    tab.keyboard.press("Tab")
    assert not tab.evaluate("document.activeElement.matches('.tabs *')")
    tab.locator("canvas.map").focus()
    tab.keyboard.press("Shift+ArrowDown")
    assert "#" in _settled(tab.locator(".tip"))
    assert tab.locator("[aria-live]").inner_text()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".word.self")


def test_keys_are_heard_before_anything_has_the_focus(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    tab.wait_for_selector(MAP)
    assert tab.evaluate("document.activeElement === document.body")
    tab.keyboard.press("]")
    until(tab, "location.hash.includes('head=1')")
    tab.keyboard.press("+")
    until(tab, "location.hash.includes('span=')")
    tab.keyboard.press("0")
    until(tab, "!location.hash.includes('span=')")
    tab.locator("[data-view=overview]").click()
    tab.get_by_role("button", name="Layer 1 · head 3").click()
    tab.wait_for_selector(MAP)
    tab.keyboard.press("[")
    until(tab, "location.hash.includes('head=2') && location.hash.includes('map=1')")


def test_the_tooltip_follows_the_wheel(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    tab.wait_for_selector(MAP)
    box = tab.locator(MAP).bounding_box()
    assert box
    # Near an edge, where the map moves under the pointer as it grows.
    at = (box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.97)
    tab.mouse.move(*at, steps=2)
    tab.wait_for_selector(".tip[data-weight]")
    for _ in range(6):
        tab.mouse.wheel(0, -300)
        tab.wait_for_timeout(60)
    after = _settled(tab.locator(".tip"))
    tab.mouse.move(at[0] + 0.5, at[1], steps=2)
    assert _settled(tab.locator(".tip")) == after


def test_an_address_that_makes_no_sense_shows_the_first_map(
    open_page: Open, short_page: str
) -> None:
    tab = open_page(
        f"{short_page}#view=map&map=99&head=-7&span=NaN&pool=magic&view=%00&set=1,x,,1e9"
    )
    tab.wait_for_selector(MAP)


def test_a_long_text_in_a_page_is_zoomed_past_its_cells(open_page: Open, tmp_path: Path) -> None:
    what = seen(600)
    url = write_page(what, tmp_path / "p.html", tokens=tokens(600), limit=100_000).as_uri()
    tab = open_page(f"{url}#view=map")
    tab.wait_for_selector(MAP)
    p = weights(what, 0, 0)
    query = 500
    key = int(p[query].argmax())
    tab.goto(f"{url}#view=map&query={query}.5&key={key}.5&span=30")
    tab.reload()
    tab.wait_for_selector(MAP)
    box = tab.locator(MAP).bounding_box()
    assert box
    tab.mouse.move(
        box["x"] + 112 + (box["width"] - 120) / 2,
        box["y"] + 96 + (box["height"] - 104) / 2,
        steps=2,
    )
    tip = tab.locator(".tip")
    assert tip_weight(tip) == pytest.approx(p[query, key].item(), rel=2e-3)
    assert "rank 1" in tip.inner_text()
    # Keys go from pair to pair, not from cell to cell.
    tab.locator("canvas.map").focus()
    tab.keyboard.press("Shift+ArrowUp")
    until(tab, f"document.querySelector('.tip').textContent.includes('#{query - 1}')")
