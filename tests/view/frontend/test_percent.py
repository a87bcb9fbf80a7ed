"""How weights are written: what stands beside 12.3% has no powers of ten in it."""

from __future__ import annotations

import re

import pytest
import torch

import regard
from regard.view import Patches
from regard.view.web import App
from tests.view.browser_page import MAP, Open, hover, tip_weight, until
from tests.view.small_traces import drawn

pytestmark = pytest.mark.xdist_group("browser")
N = 9
SMALL = re.compile(r"<0\.001% \((\d\.\d\de-\d+)\)")


def falling() -> regard.Trace:
    """Every query looks at key 0, and at each next one a twentieth as much."""
    q, k = torch.zeros(2, 1, 1, N, 4).unbind()
    q[..., 0], k[..., 0] = 2, -3 * torch.arange(N)
    return regard.trace(q, k, k)


def said(text: str) -> float:
    """The weight that a reader would take a text for."""
    found = SMALL.search(text)
    return float(found[1]) if found else float(text.rstrip("%")) / 100


def written(weight: float) -> str:
    if weight < 1e-5:
        return "<0.001%"
    return f"{100 * weight:.3g}%"


def test_weights_are_plain_numbers(open_page: Open) -> None:
    p = falling().weights()[0, 0, 0]
    assert p[-1] < 1e-10
    with App(falling(), tokens=[f" word{i}" for i in range(N)]) as app:
        tab = open_page(f"{app.url}#view=text&token=0")
        tab.wait_for_selector(".strongest")
        listed = tab.locator(".strongest .figure").all_inner_texts()
        assert listed == [written(weight) for weight in p.tolist()]
        assert listed[:4] == ["95%", "4.73%", "0.236%", "0.0117%"]
        titles = [word.get_attribute("title") or "" for word in tab.locator(".word").all()]
        told = [said(title.partition(", ")[2]) for title in titles]
        assert told == pytest.approx(p.tolist(), rel=6e-3)


def test_the_tooltip_has_the_weight_that_is_too_small_to_read(open_page: Open) -> None:
    p = falling().weights()[0, 0, 0]
    with App(falling(), tokens=[f" word{i}" for i in range(N)]) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        for key in (1, 4, 8):
            tip = hover(tab, 2, key, N)
            until(tab, f"document.querySelector('.tip').textContent.includes('word{key}')")
            assert tip_weight(tip) == pytest.approx(p[key].item(), rel=1e-4)
            what, _, rank = tip.locator(".what").inner_text().partition(", ")
            assert said(what) == pytest.approx(p[key].item(), rel=6e-3)
            assert rank == f"rank {key + 1}"


def test_a_legend_counts_as_far_down_as_its_colours(open_page: Open) -> None:
    n = 400
    even = torch.zeros(1, 1, n, 4)
    with App(regard.trace(even, even, even)) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        assert tab.locator(".ticks span").all_inner_texts() == ["0.000025%", "0.0025%", "0.25%"]


def test_patches_are_told_alike(open_page: Open) -> None:
    with App(falling(), tokens=Patches(drawn(96), (2, 4), before=["CLS"])) as app:
        tab = open_page(f"{app.url}#view=picture")
        tab.wait_for_selector("canvas.shaded[data-ready=yes]")
        assert tab.locator(".panel .word .figure").inner_text().strip() == "95%"
        box = tab.locator("canvas.shaded").bounding_box()
        assert box
        last = {"x": box["width"] - 5, "y": box["height"] - 5}
        tab.locator("canvas.shaded").hover(position=last)
        until(tab, "document.querySelector('.told').textContent.includes('rank')")
        what = tab.locator(".told").inner_text().partition(": ")[2].partition(", rank")[0]
        assert said(what) == pytest.approx(falling().weights()[0, 0, 0, 8].item(), rel=6e-3)
