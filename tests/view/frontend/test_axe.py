"""axe-core, which knows what keeps people out: nothing serious in any view of app and page."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import regard.view
from regard.commands.named_subject import subject_of
from regard.view.web import App
from regard.view.web import page as write_page
from tests.view.browser_page import MAP, Open, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.xdist_group("browser")
AXE = Path(regard.view.__file__).parent / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
SERIOUS = ("serious", "critical")
READY = {
    "sentence": ".caption strong",
    "map": MAP,
    "text": ".text .word",
    "heads": ".heads tbody td",
    "learn": ".tour .sum",
}


@cache
def program() -> str:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci in the folder of the front end")
    return AXE.read_text("utf-8")


def faults(tab: Page) -> list[str]:
    """What axe finds that is serious, and where."""
    # As text of the debugger, not of the page, whose policy would refuse it.
    tab.evaluate(f"{program()};0")
    found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert len(found["passes"]) > 5
    return [
        f"{fault['id']}: {fault['help']}: {node['html'][:160]}"
        for fault in found["violations"]
        if fault["impact"] in SERIOUS or fault["id"] in ("page-has-heading-one", "bypass")
        for node in fault["nodes"]
    ]


@pytest.mark.parametrize("where", ["app", "page"])
def test_nothing_serious(open_page: Open, tmp_path: Path, where: str) -> None:
    program()
    subject = subject_of(None, "regard-small")
    atlas = subject.atlas()
    with App(atlas, told=subject.told, reader=subject.reader) as app:
        page = write_page(atlas, tmp_path / "p.html", view="map=4&head=5").as_uri()
        tab = open_page(f"{app.url if where == 'app' else page}#map=4&head=5", color_scheme="light")
        if where == "app":
            tab.wait_for_selector(".given button")
        wrong: list[str] = []
        for theme in ("light", "dark"):
            for view, ready in READY.items():
                tab.locator(f".tabs [data-view={view}]").click()
                tab.wait_for_selector(ready)
                wrong += [f"{view}, {theme}: {fault}" for fault in faults(tab)]
            tab.get_by_role("button", name="Light or dark").click()
            until(tab, "document.querySelector('.regard').dataset.theme === 'dark'"
                  if theme == "light" else "true")  # fmt: skip
        tab.set_viewport_size({"width": 390, "height": 800})
        for view in ("sentence", "learn"):
            tab.locator(f".tabs [data-view={view}]").click()
            wrong += [f"{view}, narrow: {fault}" for fault in faults(tab)]
        assert wrong == []


def test_a_fault_is_found(open_page: Open, tmp_path: Path) -> None:
    program()
    made = tmp_path / "bad.html"
    made.write_text(
        "<!doctype html><html><title>x</title><body><h1>a</h1><img src='data:,'></body>"
    )
    assert any(fault.startswith("image-alt") for fault in faults(open_page(made.as_uri())))
