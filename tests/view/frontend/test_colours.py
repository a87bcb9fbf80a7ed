"""Colours read back from the screen: under every scale and pooling, against the exact weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from regard.seen import Seen
from regard.view.web import App
from regard.view.web import page as write_page
from tests.view.browser_page import MAP, Open, choose, hover, spot, tip_weight, until, weights
from tests.view.small_traces import seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")

# Which of the legend's colours the middle of each cell has: -1 for none of them.
READ = """places => {
  const pixels = canvas => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
    copy.drawImage(canvas, 0, 0);
    return copy.getImageData(0, 0, canvas.width, canvas.height);
  };
  const {data: known} = pixels(document.querySelector(".strip"));
  const map = pixels(document.querySelector("canvas.map"));
  const colour = (data, at) => data[at] << 16 | data[at + 1] << 8 | data[at + 2];
  const steps = new Map(Array.from({length: 256}, (_, i) => [colour(known, 4 * i), i]));
  return places.map(([x, y]) => {
    const at = 4 * (Math.floor(y) * map.width + Math.floor(x));
    return steps.get(colour(map.data, at)) ?? -1;
  });
}"""


def shares(tab: Page, cells: list[tuple[int, int]], cell: int, n: int) -> list[float]:
    """Where the colour of each cell lies between the ends of the legend, from 0 to 1."""
    tab.mouse.move(0, 0)
    tab.wait_for_selector(MAP)
    plot = tab.locator(MAP)
    # In the middle of a cell; beside it, where numbers stand there.
    part = 0.5 if plot.get_attribute("data-numbers") == "0" else 0.2
    inside = [spot(plot, (q + part) * cell, (k + part) * cell, n) for q, k in cells]
    found = tab.evaluate(READ, inside)
    assert -1 not in found
    return [step / 255 for step in found]


def chosen(tab: Page, *names: str) -> None:
    """Choose, and wait for what is drawn then."""
    for name in names:
        choose(tab, name, exact=True)
    tab.wait_for_selector(MAP)


def ticks(tab: Page) -> list[str]:
    return tab.locator(".ticks span").all_inner_texts()


def percent(text: str) -> float:
    return float(text.rstrip("%")) / 100


CELLS = [(30, 7), (39, 39), (12, 0), (25, 24), (38, 10)]


@pytest.mark.parametrize("scale", ["Linear", "Log", "Row", "Ratio"])
def test_a_colour_is_the_weight_of_a_pair(
    scale: str, open_page: Open, short_page: str, short: Seen
) -> None:
    tab = open_page(f"{short_page}#view=map&head=3")
    tab.wait_for_selector(MAP)
    chosen(tab, scale)
    p = weights(short, 0, 3)
    visible = torch.arange(1, 41)[:, None]
    shown = {"Row": p / p.amax(-1, keepdim=True), "Ratio": p * visible}.get(scale, p)
    high = shown.max().item()
    if scale == "Ratio":
        high = max(16.0, high)
    low = {"Log": high * 1e-4, "Ratio": 1 / 16}.get(scale, 0.0)
    for (q, k), share in zip(CELLS, shares(tab, CELLS, 1, 40), strict=True):
        exact = shown[q, k].item()
        place = math.log(exact / low) / math.log(high / low) if low else exact / high
        assert share == pytest.approx(min(1.0, max(0.0, place)), abs=1 / 255), (q, k)
    first, _, last = ticks(tab)
    if scale == "Ratio":
        assert float(last.rstrip("×")) == pytest.approx(high, rel=6e-3)
        assert first == "0.0625×"
    else:
        assert percent(last) == pytest.approx(high, rel=6e-3)
        assert percent(first) == pytest.approx(low, rel=6e-3)


@pytest.fixture(scope="module")
def long() -> Seen:
    return seen(1500)


@pytest.mark.parametrize(
    ("pool", "means", "pooled"),
    [
        ("Max", "the largest weight", lambda p: torch.nn.functional.max_pool2d(p, 4)),
        ("Mean", "the mean weight", lambda p: torch.nn.functional.avg_pool2d(p, 4)),
        ("Sum", "the sum of weight", lambda p: 16 * torch.nn.functional.avg_pool2d(p, 4)),
    ],
)
def test_a_colour_is_what_a_cell_is_said_to_be(
    pool: str,
    means: str,
    pooled: Callable[[torch.Tensor], torch.Tensor],
    open_page: Open,
    long: Seen,
) -> None:
    p = weights(long, 0, 1)
    cells = [(300, 60), (370, 100), (200, 1), (50, 12)]
    with App(long, tokens=tokens(1500)) as app:
        tab = open_page(f"{app.url}#view=map&head=1")
        tab.wait_for_selector(MAP)
        # Every row read, so that nothing is a draft.
        until(tab, "!document.querySelector('.legend').textContent.includes('Draft')")
        chosen(tab, pool, "Linear")
        legend = tab.locator(".legend").inner_text()
        assert f"A cell is 4 × 4 pairs: {means}." in legend
        exact = pooled(p[None])[0]
        high = exact.max().item()
        last = ticks(tab)[2]
        assert (percent(last) if "%" in last else float(last)) == pytest.approx(high, rel=0.03)
        for (q, k), share in zip(cells, shares(tab, cells, 4, 1500), strict=True):
            assert share == pytest.approx(exact[q, k].item() / high, abs=2 / 255), (q, k)
        chosen(tab, "Row")
        shown = exact / p.amax(-1).view(-1, 4).amax(1)[:, None]
        high = max(1.0, shown.max().item())
        for (q, k), share in zip(cells, shares(tab, cells, 4, 1500), strict=True):
            assert share == pytest.approx(shown[q, k].item() / high, abs=2 / 255), (q, k)
        # Over what even attention gives: a sum over a sum is a mean over a mean.
        chosen(tab, "Ratio")
        even = (1 / torch.arange(1, 1501)).view(-1, 4).mean(1)[:, None]
        shown = exact / even / (16 if pool == "Sum" else 1)
        high = max(16.0, shown.max().item())
        for (q, k), share in zip(cells, shares(tab, cells, 4, 1500), strict=True):
            place = math.log(16 * shown[q, k].item()) / math.log(16 * high)
            assert share == pytest.approx(min(1.0, max(0.0, place)), abs=3 / 255), (q, k)


def test_weight_times_value_is_a_layer_of_the_same_map(open_page: Open) -> None:
    what = seen(40)
    with App(what, tokens=tokens(40)) as app:
        tab = open_page(f"{app.url}#view=map&head=2&map=1&scale=linear")
        tab.wait_for_selector(MAP)
        chosen(tab, "Weight × value")
        until(tab, "location.hash.includes('quantity=value')")
        length = what["layers.1.attn"].trace.inputs.v[0, 1].norm(dim=-1)
        shown = weights(what, 1, 2) * length / length.mean()
        high = shown.max().item()
        for (q, k), share in zip(CELLS, shares(tab, CELLS, 1, 40), strict=True):
            assert share == pytest.approx(shown[q, k].item() / high, abs=1 / 255)
        assert "its weight × length of the value" in tab.locator(".legend").inner_text()
        tip = hover(tab, 30, 7, 40)
        assert tip_weight(tip) == pytest.approx(shown[30, 7].item(), rel=1e-4)
        rank = 1 + int((shown[30] > shown[30, 7]).sum())
        assert f"rank {rank}" in tip.inner_text()
        # More than everything is said as such.
        assert high > 1.01
        assert percent(ticks(tab)[2]) == pytest.approx(high, rel=6e-3)


def test_a_page_knows_the_largest_of_each_row_from_its_strongest(
    open_page: Open, tmp_path: Path
) -> None:
    what = seen(600)
    p = weights(what, 0, 1)
    url = write_page(what, tmp_path / "p.html", tokens=tokens(600), limit=100_000).as_uri()
    tab = open_page(f"{url}#view=map&head=1&scale=row")
    tab.wait_for_selector(MAP)
    most = torch.nn.functional.max_pool2d(p[None], 4)[0]
    shown = most / p.amax(-1).view(-1, 4).amax(1)[:, None]
    cells = [(140, 30), (75, 60), (100, 1), (20, 12)]
    for (q, k), share in zip(cells, shares(tab, cells, 4, 600), strict=True):
        assert share == pytest.approx(shown[q, k].item(), abs=0.03), (q, k)
