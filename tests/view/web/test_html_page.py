"""The page: what is in the file, and how large it is."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import RegardError
from regard.seen import Layer
from regard.view.atlas import Atlas, Patches
from regard.view.atlas.tiles import HEADER, decoded
from regard.view.web import App, bundle
from regard.view.web.html_page import chosen_levels, page
from tests.view.http_client import Visitor
from tests.view.small_traces import HOSTILE, drawn, seen, tokens


def parts(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    text = path.read_text("utf-8")
    index = re.search(r'id="regard-index">(.*?)</script>', text, re.DOTALL)
    assert index
    chunks = re.findall(r'octet-stream" id="regard-\d+">([^<]*)</script>', text)
    return json.loads(index[1]), [zlib.decompress(base64.b64decode(c)) for c in chunks]


def test_the_bytes_are_the_exact_weights(tmp_path: Path) -> None:
    what = seen(12)
    index, chunks = parts(page(what, tmp_path / "p.html", tokens=tokens(12)))
    assert [m["name"] for m in index["maps"]] == ["layers.0.attn", "layers.1.attn"]
    assert len(chunks) == 2
    at = 4 * 12
    for head in range(4):
        size = HEADER.size + 2 * 144
        found = decoded(chunks[1][at : at + size]).mean
        at += size
        exact = what["layers.1.attn"].trace.weights(heads=[head])[0, 0]
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-6)
        largest = torch.frombuffer(bytearray(chunks[1][at : at + 24]), dtype=torch.float16)
        torch.testing.assert_close(largest.float(), exact.amax(-1), rtol=1e-3, atol=1e-6)
        at += 24
    assert at == len(chunks[1])


def test_a_long_text_has_coarser_cells_and_the_strongest_keys(tmp_path: Path) -> None:
    what = seen(600)
    index, chunks = parts(page(what, tmp_path / "p.html", limit=100_000))
    (one, _) = index["maps"]
    assert one["page"]["level"] == 2
    count = one["page"]["strongest"]
    body = chunks[0][-4 * 600 * count :]
    weights = torch.frombuffer(bytearray(body[: 2 * 600 * count]), dtype=torch.float16)
    keys = torch.frombuffer(bytearray(body[2 * 600 * count :]), dtype=torch.uint16)
    top = what["layers.0.attn"].trace.top(count)
    torch.testing.assert_close(
        weights.view(600, count).float(), top.values[0, 3], rtol=1e-3, atol=1e-6
    )
    sure = top.values[0, 3] > 0
    assert (keys.view(600, count).int()[sure] == top.indices[0, 3][sure]).all()


def test_a_page_of_a_thousand_tokens_stays_small(tmp_path: Path) -> None:
    what = seen(1024, layers=4, heads=8, key_heads=8)
    made = page(what, tmp_path / "p.html", tokens=tokens(1024))
    assert made.stat().st_size < 3_000_000


def test_every_map_fits_into_the_limit() -> None:
    atlas = Atlas.of(seen(600))
    assert chosen_levels(atlas, 3_000_000) == [0, 0]
    assert chosen_levels(Atlas.of(seen(200)), None) == [0, 0]
    assert chosen_levels(atlas, 0) == [2, 2]
    with pytest.raises(regard.RegardError, match="limit= counts bytes"):
        chosen_levels(atlas, -1)


def test_a_picture_is_not_shaded_by_means() -> None:
    x = torch.randn(1, 32, 257, 4)
    t = regard.trace(x, x, x)
    assert chosen_levels(Atlas.of(t), None) == [1]
    patches = Patches(drawn(32), (16, 16), before=["CLS"])
    assert chosen_levels(Atlas.of(t, tokens=patches), None) == [0]
    assert chosen_levels(Atlas.of(t, tokens=patches), 3_000_000) == [1]


def test_hostile_tokens_close_no_element(tmp_path: Path) -> None:
    n = len(HOSTILE)
    made = page(seen(n), tmp_path / "p.html", tokens=HOSTILE)
    text = made.read_text("utf-8")
    assert parts(made)[0]["texts"] == [HOSTILE]
    # The index, two layers and both parts of the program; each closed once.
    assert len(re.findall("<script", text.split('<script type="module">')[0])) == 4
    assert len(re.findall("</script", text)) == 5
    assert "\x00" not in text


def test_the_page_may_ask_for_nothing(tmp_path: Path) -> None:
    text = page(seen(5), tmp_path / "p.html").read_text("utf-8")
    named = ('<script type="module">', '<script type="text/plain" id="regard-later">')
    programs = [text.split(name)[1].split("</script>")[0] for name in named]
    digests = [
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in programs
    ]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"default-src 'none'; script-src {allowed}; style-src" in text
    for program in programs:
        text = text.replace(program, "")
        assert "http://" not in program.replace("http://www.w3.org", "")
        assert "https://" not in program
    assert not re.search(r"(src|href)=", text)


def test_a_page_begins_with_what_was_asked_for(tmp_path: Path) -> None:
    made = page(seen(6), tmp_path / "a.html", view="map=1&head=2").read_text("utf-8")
    assert '"view":"map=1&head=2"' in made


def test_a_page_replaces_another_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    path.write_text("before")
    told: list[tuple[int, int]] = []
    page(seen(5), path, progress=lambda done, total: told.append((done, total)))
    assert told == [(i, 8) for i in range(1, 9)]
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"]


@pytest.mark.parametrize("part", ["regard", "app", "later"])
def test_what_is_loaded_at_once_is_small(part: bundle.Part) -> None:
    assert len(bundle.script(part).encode()) <= 150_000


def test_a_page_is_little_more_than_its_program(tmp_path: Path) -> None:
    program = sum(len(bundle.script(part).encode()) for part in ("regard", "later"))
    made = page(seen(5, layers=1), tmp_path / "p.html", tokens=tokens(5))
    assert program < made.stat().st_size < program + 6_000


def test_a_front_end_that_was_not_built_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "BUNDLE", tmp_path / "bundle" / "regard.js")
    with pytest.raises(regard.RegardError, match="make frontend"):
        page(seen(5), tmp_path / "p.html")
    assert not list(tmp_path.iterdir())


def test_half_characters_in_names_are_marked(tmp_path: Path) -> None:
    what = seen(4)
    what.model = "half \ud800"
    what._layers["\udfff"] = what._layers.pop("layers.1.attn")
    made = page(what, tmp_path / "page.html", tokens=["\ud800"] * 4).read_text("utf-8")
    assert "<title>half � · regard</title>" in made
    with App(what) as app:
        sent = Visitor.enter(app.url).get("page").body.decode()
    assert "<title>half � · regard</title>" in sent


def test_layers_of_which_nothing_is_known_are_left_out(tmp_path: Path) -> None:
    what = seen(4)
    what._layers["unknown"] = Layer("unknown", 1, None, [], [], [])
    assert "unknown" not in page(what, tmp_path / "page.html").read_text()
    what._layers = {"unknown": what._layers["unknown"]}
    with pytest.raises(RegardError, match="neither traces nor statistics"):
        page(what, tmp_path / "page.html")
