"""What a notebook is given when the result of an experiment is the last line of a cell."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from regard.lab import scaling
from regard.lab.apparatus.experiments import Check, Result

pytest.importorskip("matplotlib")
IMAGE = re.compile(r'<img class="regard-(\w+)" alt="([^"]*)" src="data:image/png;base64,([^"]+)">')


@pytest.fixture(scope="module")
def result() -> Result:
    found = scaling.run(widths=(16, 64), samples=8, steps=0)
    odd = Check("<b>1 < 2</b>", "<script>", False)
    return Result(found.about, found.settings, (odd,), "a & b", found.numbers, found.panels)


@pytest.fixture(scope="module")
def bundle(result: Result) -> dict[str, Any]:
    """What the cell is given: drawing it takes seconds."""
    return result._repr_mimebundle_()


def test_panels_are_drawn_for_both_papers_and_texts_are_no_markup(
    result: Result, bundle: dict[str, Any]
) -> None:
    assert bundle["text/plain"] == repr(result)
    text = bundle["text/html"]
    images = IMAGE.findall(text)
    assert [name for name, _, _ in images] == ["light", "dark"] * len(result.panels)
    drawn = [base64.b64decode(data) for _, _, data in images]
    assert all(png.startswith(b"\x89PNG") for png in drawn)
    assert len(set(drawn)) == len(drawn)
    for panel in result.panels:
        assert any(panel.title in alt for _, alt, _ in images)
    for part in ("a &amp; b", "&lt;b&gt;1 &lt; 2&lt;/b&gt;", "&lt;script&gt;", "✗ does not hold"):
        assert part in text
    assert "<script" not in text
    assert "http" not in IMAGE.sub("", text)


def test_without_matplotlib_it_is_text(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("regard.view.pictures.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert result._repr_mimebundle_() == {"text/plain": repr(result)}
    assert result._display_() == repr(result)


PAPERS = {
    ("", "light"): "light", ("", "dark"): "dark",
    ('data-theme="auto"', "dark"): "dark", ('data-theme="light"', "dark"): "light",
    ('data-theme="dark"', "light"): "dark", ('data-jp-theme-light="true"', "dark"): "light",
    ('data-jp-theme-light="false"', "light"): "dark", ('class="vscode-dark"', "light"): "dark",
}  # fmt: skip
"""What a page says of itself and what its reader prefers, and the picture to be seen."""


@pytest.mark.xdist_group("browser")
def test_a_page_shows_the_picture_for_its_paper(
    bundle: dict[str, Any], tmp_path: Path, browser: Any
) -> None:
    text, found = bundle["text/html"], {}
    visible = """() => [...document.querySelectorAll("img")]
        .filter((image) => image.offsetWidth > 0).map((image) => image.className)"""
    with browser.new_page() as tab:
        tab.set_default_timeout(60_000)
        for said, prefers in PAPERS:
            page = tmp_path / "page.html"
            page.write_text(f"<!doctype html><body {said}>{text}</body>", "utf-8")
            tab.emulate_media(color_scheme=prefers)
            tab.goto(page.as_uri())
            seen = set(tab.evaluate(visible))
            found[said, prefers] = " ".join(name.removeprefix("regard-") for name in seen)
    assert found == PAPERS
