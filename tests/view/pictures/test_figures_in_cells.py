"""What a notebook is given when a picture, a plan or a cost is the last line of a cell."""

from __future__ import annotations

import html
import re
import struct
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import regard
from regard import cost
from regard.lab import scaling
from tests.view.text_drawings import seen_model

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from regard.view import cost_plot, lab_picture, picture


def figures() -> dict[str, Any]:
    seen = seen_model(5)
    lab = scaling.run(widths=(16, 64), samples=8, steps=0)
    return {
        "heat_map": picture.heat_map(seen),
        "head_grid": picture.head_grid(seen),
        "entropy_by_layer": picture.entropy_by_layer(seen),
        "arcs": picture.arcs(seen),
        "cost_plot": cost_plot.cost_plot([cost.preset("gpt2")], 1024),
        "lab_picture": lab_picture.lab_picture(lab),
        "panel_picture": lab_picture.panel_picture(lab, lab.panels[0]),
    }


def test_every_picture_shows_itself() -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    for name, figure in figures().items():
        assert isinstance(figure, Figure), name
        found, told = formatters.DisplayFormatter().format(figure)
        png = found["image/png"]
        assert png.startswith(b"\x89PNG"), name
        wide, high = struct.unpack(">II", png[16:24])
        # Twice as many pixels as it takes room, so that it is sharp on every screen.
        assert told["image/png"] == {"width": wide // 2, "height": high // 2}, name
        assert "text/html" not in found, name
        assert 100 < wide < 4000, name


class Table(HTMLParser):
    """The cells of every table, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.rows[-1][-1] += data


def words(text: str) -> list[str]:
    return re.sub(r"[─\s]+", " ", text).split()


def test_a_plan_is_a_table() -> None:
    x = torch.zeros(1, 2, 64, 16)
    plan = regard.plan(x, x, x, mask=regard.masks.causal() & regard.masks.window(8))
    rows = Table(plan._repr_html_()).rows
    assert ["backend", plan.backend] in rows
    assert [label for label, _ in rows][-2:] == ["bytes moved", "peak memory"]
    assert "causal() &amp; window(8)" in plan._repr_html_()
    body = str(plan).partition("\n")[2]
    assert words(body) == [word for row in rows for cell in row for word in cell.split()]


@pytest.mark.parametrize("device", [None, "H100 SXM"])
def test_a_cost_is_tables(device: str | None) -> None:
    found = cost.model("llama-3-8b", "128k", device=device)
    text = found._repr_html_()
    rows = Table(text).rows
    assert ["forward pass", "MACs", "FLOPs: needed", "executed", "dense", "share"] in rows
    assert ["cache, this context", "16.0 GiB"] in rows
    assert any(row[0] == "decoding" for row in rows) == (device is not None)
    # Nothing that is printed is missing.
    shown = set(words(html.unescape(re.sub("<[^>]*>", " ", text))))
    assert set(words(str(found))) <= shown


def test_costs_side_by_side_are_one_table() -> None:
    costs = [cost.model(name, "8k") for name in ("gpt2", "llama-3-8b", "mistral-7b")]
    rows = Table(cost.compare(costs)._repr_html_()).rows
    assert rows == cost.compare(costs).rows()


def test_what_is_in_a_cell_is_text() -> None:
    odd = cost.preset("gpt2").but(name="<script>alert(1)</script>")
    for value in (cost.model(odd, 64), cost.compare([cost.model(odd, 64)])):
        assert "<script" not in value._repr_html_()
