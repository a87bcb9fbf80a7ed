"""A very long text is pasted: the app says how far it is, stops, and does something else."""

from __future__ import annotations

import time

import pytest

from regard.view.web import App
from tests.view.browser_page import Open, until
from tests.view.small_traces import seen

pytestmark = pytest.mark.xdist_group("browser")
WORDS = " ".join(f"w{i}" for i in range(35_000))


def test_a_long_text_shows_how_far_it_is_and_is_stopped(open_page: Open) -> None:
    assert len(WORDS) > 200_000
    with App(seen(5)) as app:
        tab = open_page(f"{app.url}#view=text")
        tab.locator("#regard-model").select_option("spelling")
        tab.get_by_label("Text", exact=True).first.fill(WORDS)
        tab.get_by_role("button", name="Read").click()
        far = "document.querySelector('.far')?.textContent"
        until(tab, f"/comparing words … [1-9]\\d*%/.test({far})")
        tab.get_by_role("button", name="Stop").click()
        until(tab, "document.querySelector('.status').textContent.startsWith('Stopped')")
        tab.get_by_label("Text", exact=True).first.fill("to be or")
        tab.get_by_role("button", name="Read").click()
        until(tab, "document.querySelectorAll('.word').length === 3")
        # And closing does not wait for it.
        app.session.read({"text": WORDS, "model": "spelling", "tokens": 0})
        time.sleep(0.3)
        assert app.close()
