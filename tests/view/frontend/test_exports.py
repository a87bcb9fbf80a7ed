"""What is seen, saved: each file against the exact weights."""

from __future__ import annotations

import csv
import json
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import torch
from safetensors import safe_open

import regard
from regard import masks
from regard.seen import Layer, Seen
from regard.view.atlas import tiles
from regard.view.web import App
from regard.view.web import page as write_page
from tests.view.browser_page import MAP, Open, choose, until, weights
from tests.view.small_traces import HOSTILE, seen, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")
SVG = "{http://www.w3.org/2000/svg}"


def saved(tab: Page, kind: str, folder: Path, ready: str = MAP) -> Path:
    """Choose one kind of file from the menu."""
    tab.wait_for_selector(ready)
    with tab.expect_download() as waiting:
        tab.get_by_role("button", name="Save …").click()
        tab.get_by_role("menuitem", name=kind).click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata()


def test_pictures_of_what_is_seen(
    open_page: Open, short_page: str, short: Seen, tmp_path: Path
) -> None:
    tab = open_page(f"{short_page}#view=map&head=2&map=1&scale=linear")
    picture = saved(tab, "PNG", tmp_path)
    assert picture.name == "layers.1.attn-head-2.png"
    body = picture.read_bytes()
    assert body.startswith(b"\x89PNG")
    wide, high = int.from_bytes(body[16:20]), int.from_bytes(body[20:24])
    drawn = ElementTree.parse(saved(tab, "SVG", tmp_path)).getroot()
    # Both say how large they are in print: 300 dots an inch, and millimetres.
    chunk = body.index(b"pHYs")
    assert chunk == 37
    assert [int.from_bytes(body[at : at + 4]) for at in (41, 45)] == [11811] * 2
    assert zlib.crc32(body[37:50]) == int.from_bytes(body[50:54])
    sides = [str(drawn.get(side)) for side in ("width", "height")]
    assert all(side.endswith("mm") for side in sides)
    assert [float(side[:-2]) for side in sides] == pytest.approx(
        [wide / 11.811, high / 11.811], abs=0.2
    )
    words = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    assert words[0] == "Toy · layers.1.attn · head 2"
    assert words.count("␣word39") == 2
    assert "A cell is one pair: its weight." in words
    p = weights(short, 1, 2)
    cells = {rect.findtext(f"{SVG}title"): rect for rect in drawn.iter(f"{SVG}rect")}
    told = {name.rpartition(": ")[0]: name.rpartition(": ")[2] for name in cells if name}
    assert len(told) == 40 * 41 // 2
    for query, key in ((30, 7), (39, 39)):
        found = float(told[f"␣word{query} → ␣word{key}"])
        assert found == pytest.approx(p[query, key].item(), rel=2e-3, abs=1e-6)
    assert f"{100 * p.max():.3g}%" in words


def test_many_cells_are_one_image(open_page: Open, tmp_path: Path) -> None:
    url = write_page(seen(200), tmp_path / "p.html", tokens=tokens(200)).as_uri()
    drawn = ElementTree.parse(saved(open_page(f"{url}#view=map"), "SVG", tmp_path)).getroot()
    cells, legend = (image.get("href", "") for image in drawn.iter(f"{SVG}image"))
    assert cells.startswith("data:image/png;base64,")
    assert legend.startswith("data:image/png;base64,")
    assert any("word190" in (text.text or "") for text in drawn.iter(f"{SVG}text"))


def test_numbers_of_what_is_seen(
    open_page: Open, short_page: str, short: Seen, tmp_path: Path
) -> None:
    tab = open_page(f"{short_page}#view=map")
    with saved(tab, "CSV", tmp_path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1600
    p = weights(short, 0, 0)
    row = rows[30 * 40 + 7]
    assert (row["query"], row["key"], row["key_token"]) == ("30", "7", " word7")
    assert float(row["mean"]) == pytest.approx(p[30, 7].item(), rel=2e-3, abs=1e-6)
    # What a query must not see has no number, what it may see has one.
    for line in rows:
        masked = int(line["key"]) > int(line["query"])
        assert (line["mean"] == line["max"] == "") is masked
    found, about = tensors(saved(tab, "safetensors", tmp_path))
    torch.testing.assert_close(found["weight"], p, rtol=1e-3, atol=1e-6)
    assert (about["layer"], about["head"], about["cell"]) == ("layers.0.attn", "0", "1")
    assert (about["queries"], about["keys"]) == ("0:40", "0:40")
    assert json.loads(about["key_tokens"]) == tokens(40)


def test_numbers_of_a_part_that_is_seen_pooled(open_page: Open, tmp_path: Path) -> None:
    what = seen(1500)
    with App(what, tokens=tokens(1500)) as app:
        tab = open_page(f"{app.url}#view=map&head=1&query=700&key=400&span=1200")
        found, about = tensors(saved(tab, "safetensors", tmp_path))
    cell = int(about["cell"])
    assert cell == 2
    (q0, q1), (k0, k1) = (map(int, about[side].split(":")) for side in ("queries", "keys"))
    assert 0 < q0 < 300
    assert k1 < 1200
    p = weights(what, 0, 1)[q0:q1, k0:k1]
    mean = torch.nn.functional.avg_pool2d(p[None], cell, ceil_mode=True)[0]
    most = torch.nn.functional.max_pool2d(p[None], cell, ceil_mode=True)[0]
    assert found["mean"].shape == mean.shape
    # Pooled cells are kept in steps, down to a millionth of the largest.
    sure = mean > most.max() * 1e-5
    torch.testing.assert_close(found["mean"][sure], mean[sure], rtol=0.03, atol=0)
    torch.testing.assert_close(found["max"][sure], most[sure], rtol=0.03, atol=0)


def test_numbers_wait_until_drafts_are_read_in_full(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "PAIRS", 1 << 16)
    what = seen(900)
    with App(what) as app:
        tab = open_page(f"{app.url}#view=map")
        tab.wait_for_selector(MAP)
        assert "Draft: 1 of 2 rows" in tab.locator(".legend").inner_text()
        found, about = tensors(saved(tab, "safetensors", tmp_path))
        assert "Draft" not in tab.locator(".legend").inner_text()
    assert (about["cell"], about["key_tokens"]) == ("2", "null")
    most = torch.nn.functional.max_pool2d(weights(what, 0, 0)[None], 2)[0]
    sure = most > 1e-5
    torch.testing.assert_close(found["max"][sure], most[sure], rtol=0.03, atol=0)


def test_pairs_past_the_cells_of_a_page(open_page: Open, tmp_path: Path) -> None:
    what = seen(600)
    url = write_page(what, tmp_path / "p.html", tokens=tokens(600), limit=100_000).as_uri()
    tab = open_page(f"{url}#view=map&query=500&key=450&span=120")
    tab.wait_for_selector(MAP)
    until(tab, "document.querySelector('.legend').textContent.includes('Full colour')")
    found, _ = tensors(saved(tab, "safetensors", tmp_path))
    p = weights(what, 0, 0)
    exact = p[found["pairs"][:, 0].long(), found["pairs"][:, 1].long()]
    assert len(exact) > 20
    torch.testing.assert_close(found["pair_weights"], exact, rtol=1e-3, atol=1e-6)


def test_the_app_gives_the_whole_page(open_page: Open, tmp_path: Path) -> None:
    what = seen(40)
    with App(what, tokens=tokens(40)) as app:
        page = saved(open_page(f"{app.url}#view=map"), "HTML", tmp_path)
    assert page.name == "Toy.html"
    assert page.read_text("utf-8") == write_page(what, tmp_path / "p.html", tokens(40)).read_text()


def test_a_page_offers_no_page(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    tab.wait_for_selector(MAP)
    tab.get_by_role("button", name="Save …").click()
    kinds = tab.locator("[role=menuitem] .name").all_inner_texts()
    assert kinds == ["PNG", "SVG", "CSV", "safetensors"]


def test_all_heads_on_one_sheet(open_page: Open, short_page: str, tmp_path: Path) -> None:
    tab = open_page(f"{short_page}#view=overview")
    for kind in ("PNG", "SVG"):
        with tab.expect_download() as waiting:
            tab.get_by_role("button", name="Save …").click()
            tab.get_by_role("menuitem", name=kind).click()
        waiting.value.save_as(tmp_path / waiting.value.suggested_filename)
    assert (tmp_path / "Toy-heads.png").read_bytes().startswith(b"\x89PNG")
    drawn = ElementTree.parse(tmp_path / "Toy-heads.svg").getroot()
    pictures = {image.get("href") for image in drawn.iter(f"{SVG}image")}
    assert len(pictures) == 8  # Every head has another map.
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert [word for word in words if (word or "").startswith("layers.")] == [
        "layers.0.attn",
        "layers.1.attn",
    ]


def weighed(path: Path) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Of a table its tokens, their weights (NaN where there is none), and which are exact."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["index"] for row in rows] == [str(i) for i in range(len(rows))]
    return (
        [row["token"] for row in rows],
        torch.tensor([float(row["weight"] or "nan") for row in rows]),
        torch.tensor([{"true": True, "false": False}[row["exact"]] for row in rows]),
    )


def allowed(p: torch.Tensor) -> torch.Tensor:
    """Weights of a causal map; NaN where a query must not see a key."""
    return p.masked_fill(torch.ones_like(p, dtype=torch.bool).triu(1), torch.nan)


def assert_told(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6, equal_nan=True)


def test_the_numbers_of_a_text(
    open_page: Open, short_page: str, short: Seen, tmp_path: Path
) -> None:
    tab = open_page(f"{short_page}#view=text&token=30&head=1&map=1")
    table = saved(tab, "CSV", tmp_path, ".word")
    assert table.name == "layers.1.attn-head-1-token-30-looks.csv"
    names, found, exact = weighed(table)
    assert names == tokens(40)
    assert exact.all()
    # What is masked has no number, here as in the file of a map.
    assert_told(found, allowed(weights(short, 1, 1))[30])
    choose(tab, "Is seen by")
    tab.locator(".set [data-head='3']").click()
    until(tab, "document.querySelector('h2').textContent.includes('mean of 2 heads')")
    table = saved(tab, "CSV", tmp_path, ".word")
    assert table.name == "layers.1.attn-the-mean-of-2-heads-token-30-seen.csv"
    mean = (weights(short, 1, 1) + weights(short, 1, 3)) / 2
    assert_told(weighed(table)[1], allowed(mean)[:, 30])
    choose(tab, "All layers")
    until(tab, "document.querySelector('h2').textContent.includes('of 2 layers')")
    table = saved(tab, "CSV", tmp_path, ".word")
    assert table.name == "the-mean-of-all-heads-of-2-layers-token-30-seen.csv"
    every = [weights(short, layer, head) for layer in range(2) for head in range(4)]
    assert_told(weighed(table)[1], allowed(torch.stack(every).mean(0))[:, 30])


def test_the_numbers_of_layers_with_several_masks(open_page: Open, tmp_path: Path) -> None:
    what = seen(12)
    first = what["layers.0.attn"]
    q, k, v = torch.randn(3, 1, 4, 12, 8).unbind()
    narrow = Layer(first.path)
    narrow.take(regard.trace(q, k, v, mask=masks.causal() & masks.window(3)), 0, 0, keep=True)
    what._layers[first.path] = narrow
    url = write_page(what, tmp_path / "p.html", tokens=tokens(12)).as_uri()
    every = [weights(what, layer, head) for layer in range(2) for head in range(4)]
    mean = allowed(torch.stack(every).mean(0))
    for direction, expected in (("looks", mean[8]), ("seen", mean[:, 8])):
        # What one layer masks, another may see.
        tab = open_page(f"{url}#view=text&token=8&layers=all&direction={direction}")
        assert_told(weighed(saved(tab, "CSV", tmp_path, ".word"))[1], expected)
        note = tab.locator(".legend .note").inner_text()
        assert ("Masks leave 9 tokens, #0 to #8; others" in note) is (direction == "looks")


def test_the_numbers_of_a_text_say_which_are_exact(open_page: Open, tmp_path: Path) -> None:
    what = seen(600)
    url = write_page(what, tmp_path / "p.html", tokens=tokens(600), limit=100_000).as_uri()
    tab = open_page(f"{url}#view=text&token=500")
    _, found, exact = weighed(saved(tab, "CSV", tmp_path, ".word"))
    p = weights(what, 0, 0)[500]
    # The strongest four, and those that are masked.
    assert exact.nonzero()[:, 0].tolist() == sorted([*p.topk(4).indices.tolist(), *range(501, 600)])
    assert_told(found[exact], allowed(weights(what, 0, 0))[500][exact])
    assert not found[:501].isnan().any()


def test_a_text_is_drawn_as_it_is_seen(
    open_page: Open, short_page: str, short: Seen, tmp_path: Path
) -> None:
    tab = open_page(f"{short_page}#view=text&token=30&head=1")
    picture = saved(tab, "PNG", tmp_path, ".word").read_bytes()
    assert picture.startswith(b"\x89PNG")
    drawn = ElementTree.parse(saved(tab, "SVG", tmp_path, ".word")).getroot()
    left, top, wide, high = map(float, str(drawn.get("viewBox")).split())
    assert (left, top) == (0, 0)
    # Its units are pixels of the screen, 96 an inch; it says its size in millimetres, and the
    # picture has 300 dots an inch.
    millimetres = [float(str(drawn.get(side)).removesuffix("mm")) for side in ("width", "height")]
    assert millimetres == pytest.approx([wide / 96 * 25.4, high / 96 * 25.4], abs=0.01)
    sides = [int.from_bytes(picture[at : at + 4]) for at in (16, 20)]
    assert sides == pytest.approx([wide / 96 * 300, high / 96 * 300], abs=1)
    texts = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    assert texts[0] == "Toy · layers.0.attn · head 1 · ␣word30 #30 looks at"
    assert texts[1:41] == [f"word{i}" for i in range(40)]
    assert tab.locator(".legend .ticks span").all_inner_texts() == texts[41:44]
    said = tab.locator(".legend .note").inner_text()
    assert " ".join(texts[44:]) == said
    assert said.startswith("A token is coloured by the weight that it gets. The mask causal()")
    p = weights(short, 0, 1)[30]
    boxes = [box for box in drawn.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    told = [(box.findtext(f"{SVG}title") or "").split(", ") for box in boxes]
    assert [name for name, _ in told] == [f"#{i}" for i in range(40)]
    assert told[31][1] == "masked"
    for word, (box, (_, weight)) in enumerate(zip(boxes[:31], told[:31], strict=True)):
        if not weight.startswith("<"):
            assert float(weight.rstrip("%")) / 100 == pytest.approx(p[word].item(), rel=6e-3)
        shade = tab.locator(f".word[data-place='{word}']")
        assert f"background:{box.get('fill')};" in (shade.get_attribute("style") or "")
        assert float(box.get("x") or 0) + float(box.get("width") or 0) <= wide
    # The one that is asked about has a frame.
    (frame,) = [box for box in drawn.iter(f"{SVG}rect") if box.get("stroke")]
    assert frame.get("x") == boxes[30].get("x")


def test_the_menu_is_used_by_keys(open_page: Open, short_page: str) -> None:
    tab = open_page(f"{short_page}#view=map")
    tab.wait_for_selector(MAP)
    button = tab.get_by_role("button", name="Save …")
    button.focus()
    tab.keyboard.press("ArrowDown")
    assert button.get_attribute("aria-expanded") == "true"
    chosen = "document.activeElement.querySelector('.name')?.textContent"
    assert tab.evaluate(chosen) == "PNG"
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate(chosen) == "safetensors"
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate(chosen) == "SVG"
    tab.keyboard.press("Escape")
    assert tab.locator("[role=menu]").is_hidden()
    assert tab.evaluate("document.activeElement.textContent") == "Save …"
    tab.keyboard.press("ArrowDown")
    with tab.expect_download() as waiting:
        tab.keyboard.press("Enter")
    assert waiting.value.suggested_filename.endswith(".png")


def test_hostile_tokens_are_text_in_every_file(open_page: Open, tmp_path: Path) -> None:
    n = len(HOSTILE)
    tab = open_page(write_page(seen(n), tmp_path / "p.html", tokens=HOSTILE).as_uri() + "#view=map")
    drawn = ElementTree.parse(saved(tab, "SVG", tmp_path)).getroot()
    tags = {each.tag.removeprefix(SVG) for each in drawn.iter()}
    assert tags == {"svg", "rect", "text", "title", "image"}
    with saved(tab, "CSV", tmp_path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # What is no character cannot be written as one.
    assert [row["key_token"] for row in rows[:n]] == [
        t.replace("\ud800", "\ufffd") for t in HOSTILE
    ]
    _, about = tensors(saved(tab, "safetensors", tmp_path))
    assert json.loads(about["key_tokens"]) == HOSTILE
    tab.locator("[data-view=text]").click()
    drawn = ElementTree.parse(saved(tab, "SVG", tmp_path, ".word")).getroot()
    assert {each.tag.removeprefix(SVG) for each in drawn.iter()} == tags
    names, _, _ = weighed(saved(tab, "CSV", tmp_path, ".word"))
    assert names == [t.replace("\ud800", "\ufffd") for t in HOSTILE]


def test_a_head_for_a_paper(open_page: Open, short: Seen, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with App(short, tokens=tokens(40)) as app:
        path = saved(open_page(f"{app.url}#view=map&map=1&head=2"), "PDF", tmp_path)
    assert path.name == "layers.1.attn-head-2.pdf"
    data = path.read_bytes()
    assert data.startswith(b"%PDF")
    assert b"/FontFile2" in data
    box = [float(edge) for edge in re.findall(rb"/MediaBox \[ ([^]]*) \]", data)[0].split()]
    assert box[2] - box[0] == pytest.approx(180 / 25.4 * 72, abs=0.5)
