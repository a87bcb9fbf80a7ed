"""What a hand does in a browser, and what it reads there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from regard.seen import Seen

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Open = Callable[..., "Page"]
MAP = "canvas.map[data-ready=yes]"


def weights(what: Seen, layer: int, head: int) -> torch.Tensor:
    return what[f"layers.{layer}.attn"].trace.weights(heads=[head])[0, 0]


def spot(plot: Locator, query: float, key: float, n: int) -> tuple[float, float]:
    """Where a place of a map lies that shows the whole text: in pixels of its canvas. It stands
    in the middle of its room."""
    box = plot.bounding_box()
    assert box
    left, top = (112, 96) if box["width"] >= 560 else (64, 60)
    wide, high = box["width"] - left - 8, box["height"] - top - 8
    zoom = min(wide / n, high / n, 48)
    return left + (wide - n * zoom) / 2 + key * zoom, top + (high - n * zoom) / 2 + query * zoom


def hover(tab: Page, query: float, key: float, n: int) -> Locator:
    """Point at a pair of a map that shows the whole text."""
    plot = tab.locator(MAP)
    x, y = spot(plot, query + 0.5, key + 0.5, n)
    box = plot.bounding_box()
    assert box
    tab.mouse.move(box["x"] + x, box["y"] + y, steps=2)
    return tab.locator(".tip")


def contrast(one: str, other: str) -> float:
    """How far apart two colours are for an eye, from 1 to 21, as WCAG counts."""
    lights = []
    for colour in (one, other):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(lights) / min(lights)


def until(tab: Page, condition: str) -> None:
    """Wait for something to be true of the page, whose policy lets nobody evaluate text in it."""
    for _ in range(1200):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(50)
    shown = tab.evaluate("document.body.innerText")
    raise AssertionError(f"never: {condition}\nThe page shows: {shown}")


def choose(tab: Page, name: str, *, exact: bool = False) -> None:
    """Press one of the buttons of a choice. What is shown is drawn anew when something comes, its
    buttons too: so the one that counts is the one that is there afterwards."""
    from playwright.sync_api import expect

    button = tab.get_by_role("radio", name=name, exact=exact)
    button.click()
    expect(button).to_be_checked()


def tip_weight(tip: Locator) -> float:
    tip.page.wait_for_selector(".tip[data-weight]")
    return float(tip.get_attribute("data-weight") or "nan")
