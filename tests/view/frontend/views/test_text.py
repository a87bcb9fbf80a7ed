"""The text view in a real browser: heads, groups, layers, windows, and tokens without a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard
from regard import masks
from regard.seen import Seen
from regard.traces import Trace
from regard.view.web import page as write_page
from tests.view.browser_page import Open, choose, until, weights
from tests.view.small_traces import tokens

pytestmark = pytest.mark.xdist_group("browser")


def windowed(n: int = 30) -> Trace:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
    return regard.trace(q, k, v, mask=masks.causal() & masks.window(5))


@pytest.fixture(scope="module")
def window_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "window.html"
    return write_page(windowed(), path, tokens=tokens(30)).as_uri()


def places(tab: object, kind: str) -> list[int]:
    found = tab.locator(f".word{kind}").all()  # type: ignore[attr-defined]
    return [int(word.get_attribute("data-place")) for word in found]


def test_what_a_window_hides_is_dim_and_the_rest_in_brackets(
    open_page: Open, window_page: str
) -> None:
    tab = open_page(f"{window_page}#view=text&token=20")
    tab.wait_for_selector(".word")
    assert places(tab, ":not(.masked)") == [*range(15, 21)]
    body = tab.locator(".words").inner_text().replace("\n", " ")
    assert body.index("word14") < body.index("[") < body.index("word15")
    assert body.index("word20") < body.index("]") < body.index("word21")
    assert "leaves 6 tokens, #15 to #20, in brackets" in tab.locator(".text").inner_text()
    choose(tab, "Is seen by")
    until(tab, "document.querySelector('h2').textContent.includes('is seen by')")
    assert places(tab, ":not(.masked)") == [*range(20, 26)]
    tab.locator(".word[data-place='2']").click()
    until(tab, "document.querySelector('h2').textContent.includes('#2 is')")
    assert places(tab, ":not(.masked)") == [*range(2, 8)]


def test_heads_that_share_keys_stand_in_one_bracket(open_page: Open, window_page: str) -> None:
    tab = open_page(f"{window_page}#view=text&token=20&set=1,4")
    tab.wait_for_selector(".shared")
    groups = [group.inner_text().split() for group in tab.locator(".shared").all()]
    assert groups == [["0", "1", "2", "keys", "0"], ["3", "4", "5", "keys", "1"]]
    pressed = tab.locator(".set [aria-pressed=true]").all_inner_texts()
    assert pressed == ["1", "4"]
    p = windowed().weights(queries=[20])[0, [1, 4], 0].mean(0)
    assert tab.locator(".strongest .place").first.inner_text() == f"#{int(p.argmax())}"
    tab.locator(".set [data-head='4']").click()
    until(tab, "document.querySelector('h2').textContent.includes('in head 1')")


def test_all_layers_are_averaged(open_page: Open, short_page: str, short: Seen) -> None:
    tab = open_page(f"{short_page}#view=text&token=30&head=1")
    choose(tab, "All layers")
    until(tab, "document.querySelector('h2').textContent.includes('all heads of 2 layers')")
    both = [weights(short, layer, head)[30] for layer in range(2) for head in range(4)]
    p = torch.stack(both).mean(0)
    assert tab.locator(".strongest .place").first.inner_text() == f"#{int(p.argmax())}"
    shown = tab.locator(".strongest .figure").first.inner_text().removesuffix("%")
    assert float(shown) / 100 == pytest.approx(p.max().item(), rel=1e-2)
    assert tab.locator(".set button").first.is_disabled()
    until(tab, "location.hash.includes('layers=all')")


def test_a_token_without_a_name_is_told_once(open_page: Open, tmp_path: Path) -> None:
    url = write_page(windowed(12), tmp_path / "p.html").as_uri()
    tab = open_page(f"{url}#view=text&token=11")
    tab.wait_for_selector(".word")
    assert tab.locator("h2").inner_text() == "#11 looks at, in head 0"
    assert tab.locator(".strongest li").first.inner_text().count("#") == 1
    assert tab.locator(".word").all_inner_texts() == [f"#{i}" for i in range(12)]
