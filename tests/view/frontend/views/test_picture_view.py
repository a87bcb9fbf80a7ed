"""The picture in a real browser: patches are chosen, and shaded by the exact weights."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import regard
from regard import masks
from regard.view import App, Patches
from regard.view.web import page as write_page
from tests.view.browser_page import MAP, Open, choose, until
from tests.view.small_traces import drawn, seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")
READY = "canvas.shaded[data-ready=yes]"
SIDE = 6


@pytest.fixture(scope="module")
def trace() -> regard.Trace:
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 4, 1 + SIDE * SIDE, 8).unbind()
    return regard.trace(q * 2, k, k)


def patches(picture: torch.Tensor | None = None) -> Patches:
    return Patches(drawn(96) if picture is None else picture, (SIDE, SIDE), before=["CLS"])


def middle(tab: Page, token: int) -> tuple[float, float]:
    box = tab.locator(READY).bounding_box()
    assert box
    row, column = divmod(token - 1, SIDE)
    return (
        box["x"] + (column + 0.5) / SIDE * box["width"],
        box["y"] + (row + 0.5) / SIDE * box["height"],
    )


def told(tab: Page, token: int) -> tuple[float, int]:
    """The weight and the rank that are said of a patch that is pointed at."""
    tab.mouse.move(*middle(tab, token), steps=2)
    until(tab, f"document.querySelector('.told').textContent.includes('#{token}:')")
    found = re.search(r": ([\d.]+)%, rank (\d+) of 37", tab.locator(".told").inner_text())
    assert found
    return float(found[1]) / 100, int(found[2])


def test_a_patch_tells_its_exact_weight(
    open_page: Open, trace: regard.Trace, tmp_path: Path
) -> None:
    p = trace.weights()[0]
    url = write_page(trace, tmp_path / "p.html", tokens=patches()).as_uri()
    with App(trace, tokens=patches()) as app:
        for address in (url, app.url):
            tab = open_page(f"{address}#view=picture&head=2")
            tab.wait_for_selector(READY)
            assert tab.locator(".stage h2").inner_text() == "CLS\n#0 looks at, in head 2"
            sum_of = f"{100 * p[2, 0, 1:].sum():.3g}%"
            assert f"together get {sum_of}" in tab.locator(".legend").inner_text()
            for token in (1, 17, 36):
                weight, rank = told(tab, token)
                assert weight == pytest.approx(p[2, 0, token].item(), rel=6e-3)
                assert rank == 1 + int((p[2, 0] > p[2, 0, token]).sum())


def test_patches_are_chosen_by_mouse_and_keys(
    open_page: Open, trace: regard.Trace, tmp_path: Path
) -> None:
    p = trace.weights()[0]
    tab = open_page(write_page(trace, tmp_path / "p.html", tokens=patches()).as_uri())
    tab.wait_for_selector(MAP)
    tab.locator("canvas.map").focus()
    tab.keyboard.press("Shift+ArrowUp")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(READY)
    tab.get_by_role("button", name="Map").click()
    tab.get_by_role("button", name="Picture").click()
    tab.wait_for_selector(READY)
    tab.mouse.click(*middle(tab, 15))
    until(tab, "document.querySelector('h2').textContent.includes('patch 2,2 #15 looks at')")
    weight, _ = told(tab, 20)
    assert weight == pytest.approx(p[0, 15, 20].item(), rel=6e-3)
    tab.locator(READY).focus()
    tab.keyboard.press("ArrowDown")
    until(tab, "document.querySelector('h2').textContent.includes('patch 3,2 #21')")
    until(tab, "document.activeElement.matches('canvas.shaded')")
    tab.keyboard.press("ArrowLeft")
    until(tab, "document.querySelector('h2').textContent.includes('patch 3,1 #20')")
    choose(tab, "Is seen by")
    until(tab, "document.querySelector('h2').textContent.includes('is seen by')")
    weight, _ = told(tab, 30)
    assert weight == pytest.approx(p[0, 30, 20].item(), rel=6e-3)
    tab.get_by_role("button", name="the mean of all heads").click()
    until(tab, "document.querySelector('h2').textContent.includes('mean of 4 heads')")
    weight, _ = told(tab, 30)
    assert weight == pytest.approx(p[:, 30, 20].mean().item(), rel=6e-3)
    tab.get_by_role("button", name="CLS").click()
    until(tab, "document.querySelector('h2').textContent.includes('CLS #0')")
    until(tab, "document.querySelectorAll('.thumb canvas[data-ready=yes]').length === 6")
    tab.get_by_role("button", name="head 3").click()
    until(tab, "location.hash.includes('head=3')")


def saved(tab: Page, kind: str, folder: Path) -> Path:
    with tab.expect_download() as waiting:
        tab.get_by_role("button", name="Save …").click()
        tab.get_by_role("menuitem", name=kind).click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def test_a_shaded_picture_is_saved_with_its_numbers(
    open_page: Open, trace: regard.Trace, tmp_path: Path
) -> None:
    url = write_page(trace, tmp_path / "p.html", tokens=patches()).as_uri()
    tab = open_page(f"{url}#view=picture&head=2&token=15&direction=seen")
    tab.wait_for_selector(READY)
    assert saved(tab, "PNG", tmp_path).read_bytes().startswith(b"\x89PNG")
    drawn_to = saved(tab, "SVG", tmp_path).read_text()
    assert "head 2 · patch 2,2 #15 is seen by<" in drawn_to
    assert drawn_to.count("<image ") == 2
    table = saved(tab, "CSV", tmp_path)
    assert table.name == "trace-head-2-token-15-seen.csv"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["token"] for row in rows[:3]] == ["CLS", "0,0", "0,1"]
    found = torch.tensor([float(row["weight"]) for row in rows])
    torch.testing.assert_close(found, trace.weights()[0, 2, :, 15], rtol=1e-3, atol=1e-6)


def test_words_that_a_picture_looks_at_are_saved_as_numbers(
    open_page: Open, tmp_path: Path
) -> None:
    q, k = torch.randn(1, 2, SIDE * SIDE, 8), torch.randn(1, 2, 3, 8)
    t = regard.trace(q, k, k)
    names, picture = ["a", " red", " sun"], Patches(drawn(96), (SIDE, SIDE))
    url = write_page(t, tmp_path / "p.html", tokens=names, queries=picture).as_uri()
    tab = open_page(f"{url}#view=picture&token=7")
    tab.wait_for_selector(READY)
    tab.get_by_role("button", name="Save …").click()
    assert tab.locator("[role=menuitem] .name").all_inner_texts() == ["CSV"]
    tab.keyboard.press("Escape")
    with saved(tab, "CSV", tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["token"] for row in rows] == names
    assert float(rows[1]["weight"]) == pytest.approx(t.weights()[0, 0, 7, 1].item(), rel=2e-3)


BRIGHT = """side => {
  const canvas = document.querySelector("canvas.shaded");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
  return Array.from({length: side * side}, (_, i) => {
    const y = Math.floor((Math.floor(i / side) + 0.5) * canvas.height / side);
    const x = Math.floor((i % side + 0.5) * canvas.width / side);
    const at = 4 * (y * canvas.width + x);
    return 0.2126 * data[at] + 0.7152 * data[at + 1] + 0.0722 * data[at + 2];
  });
}"""


def test_the_more_a_patch_gets_the_brighter_it_is(
    open_page: Open, trace: regard.Trace, tmp_path: Path
) -> None:
    black = patches(torch.zeros(3, 60, 60))
    url = write_page(trace, tmp_path / "p.html", tokens=black).as_uri()
    tab = open_page(f"{url}#view=picture&head=1")
    tab.wait_for_selector(READY)
    bright = torch.tensor(tab.evaluate(BRIGHT, SIDE))
    by_weight = bright[trace.weights()[0, 1, 0, 1:].argsort()]
    assert (by_weight.diff() > -1).all()
    assert by_weight[-1] > by_weight[0] + 60


def test_words_look_at_a_picture(open_page: Open, tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, SIDE * SIDE, 8)
    t = regard.trace(q, k, k)
    picture = Patches(drawn(96), (SIDE, SIDE))
    words = ["a", " red", " <sun>"]
    url = write_page(t, tmp_path / "p.html", tokens=picture, queries=words).as_uri()
    tab = open_page(f"{url}#view=picture")
    tab.wait_for_selector(READY)
    tab.get_by_role("button", name="<sun>").click()
    until(tab, "document.querySelector('h2').textContent.includes('<sun> #2 looks at')")
    weight = t.weights()[0, 0, 2]
    legend = tab.locator(".legend .ticks").inner_text()
    assert f"{100 * weight.max():.3g}%" in legend
    choose(tab, "Is seen by")
    until(tab, "document.querySelector('h2').textContent.includes('is seen by')")
    shaded = tab.locator(".panel .word").all_inner_texts()
    assert f"{100 * t.weights()[0, 0, 0, 2]:.3g}%" in shaded[0]


def test_without_a_picture_there_is_no_such_view(open_page: Open, tmp_path: Path) -> None:
    url = write_page(seen(5), tmp_path / "p.html", tokens=tokens(5)).as_uri()
    tab = open_page(f"{url}#view=picture")
    tab.wait_for_selector(".said .word")
    assert tab.get_by_role("button", name="Picture").count() == 0


def test_a_layer_that_looks_at_no_picture_says_so(open_page: Open, tmp_path: Path) -> None:
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 9, 8)
    found = seen(4, layers=1, heads=1, key_heads=1)
    other = regard.seen.Layer("cross")
    other.take(regard.trace(q, k, k), 0, 0, keep=True)
    found._layers["cross"] = other
    url = write_page(found, tmp_path / "p.html", tokens=Patches(drawn(96), (3, 3))).as_uri()
    tab = open_page(f"{url}#view=picture")
    tab.wait_for_selector(".picture .note")
    assert "looks at no picture" in tab.locator(".picture").inner_text()
    tab.locator("#regard-layer").select_option("1")
    tab.wait_for_selector(READY)


@pytest.mark.parametrize("mask", [masks.causal(), masks.keep(torch.ones(9, 9).tril().bool())])
def test_masked_patches_have_no_number_in_a_table(
    open_page: Open, tmp_path: Path, mask: masks.Mask
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 9, 4)
    found = regard.trace(x, x, x, mask=mask)
    url = write_page(found, tmp_path / "p.html", tokens=Patches(drawn(96), (3, 3))).as_uri()
    for direction, shown in (("looks", range(5)), ("seen", range(4, 9))):
        tab = open_page(f"{url}#view=picture&token=4&direction={direction}")
        tab.wait_for_selector(READY)
        with saved(tab, "CSV", tmp_path).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [at for at, row in enumerate(rows) if row["weight"]] == list(shown)
