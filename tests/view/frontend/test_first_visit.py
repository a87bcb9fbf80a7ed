"""Somebody who opens the app for the first time: what they can find out, in how few actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from regard.commands.first_view import first_view
from regard.commands.named_subject import subject_of
from regard.view.subjects import Subject, ViewOptions
from regard.view.web import App
from tests.view.browser_page import Open, until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.xdist_group("browser")


class Hand:
    """Counts what is done. Looking is free, but only at what is on the screen."""

    def __init__(self, opened: Any, url: str) -> None:
        self.actions = 1
        self.tab: Page = opened(url)
        self.tab.set_viewport_size({"width": 1440, "height": 900})

    def hover(self, what: Locator) -> None:
        self.actions += 1
        what.hover()

    def click(self, what: Locator) -> None:
        assert what.is_visible()
        self.actions += 1
        what.click()

    def read(self, what: Locator) -> str:
        """What stands there, if nothing has to be scrolled to see it."""
        box = what.bounding_box()
        assert box is not None
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 900, "it is below the screen"
        return what.inner_text().replace("\xa0", " ")


def test_what_head_4_5_does_and_whether_it_matters_in_six_actions(open_page: Open) -> None:
    subject = subject_of(None, "regard-small")
    atlas = subject.atlas()
    names = list(atlas[0].keys or ())
    with App(atlas, told=subject.told, reader=subject.reader) as app:
        hand = Hand(open_page, f"{app.url}#{first_view(subject, atlas, ViewOptions())}")
        tab = hand.tab
        until(tab, "document.querySelectorAll('.head[data-badge]').length === 64")
        until(tab, "document.querySelectorAll('.bars tbody tr').length === 10")
        told = []
        for name in (" Lily", " ball", " red"):
            last = len(names) - 1 - names[::-1].index(name)
            hand.hover(tab.locator(f".said .word[data-place='{last}']"))
            tab.wait_for_selector(f".sentence[data-asked='{last}'][data-shown='4.5']")
            told.append(hand.read(tab.locator(".caption")))
        assert "‘red’ looks at what followed ‘red’ before: ‘ball’, 43 %" in told[-1]
        assert all(each.startswith("Layer 4 · head 5 · induction: ") for each in told)
        assert "looks at what followed the same token before" in hand.read(tab.locator(".kinds"))
        before = hand.read(tab.locator(".bars tbody tr").first)
        assert "ball" in before
        hand.click(tab.get_by_role("button", name="Layer 4 · head 5", exact=True))
        until(tab, "!!document.querySelector('.moved')")
        change = hand.read(tab.locator(".moved"))
        assert "ball" in change
        assert "of all probability moved" in change
        assert hand.actions <= 6
    assert f"{100 * moved(subject):.1f} % of all probability moved" in change


@torch.no_grad()
def moved(subject: Subject) -> float:
    """How much probability the head moves, by a run whose output projection is given zeros."""
    assert subject.reader is not None
    model: Any = subject.reader.model
    ids = torch.tensor([subject.told.ids])
    plain = model(ids)[0, -1].softmax(-1)

    def silenced(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        width = given[0].shape[-1] // 8
        heads = given[0].clone()
        heads[..., 5 * width : 6 * width] = 0
        return (heads,)

    hook = model.blocks[4].attention.out_proj.register_forward_pre_hook(silenced)
    off = model(ids)[0, -1].softmax(-1)
    hook.remove()
    return float((plain - off).abs().sum()) / 2
