"""Numbers of every head: what they are, and that the grid shows them."""

from __future__ import annotations

import math
import re

import pytest
import torch
from rich.cells import cell_len

import regard
from regard import masks
from regard.interpret.head_scores.pairs import weight_blocks
from regard.traces import Trace
from regard.view import head_grid
from regard.view.atlas import HeadFigures, head_figures, heads
from regard.view.terminal.colours import colour
from tests.view.text_drawings import bare, coloured, drawn, seen_model


def by_hand(weights: torch.Tensor) -> tuple[list[float], list[float], list[float]]:
    """Normalised entropy, sink and distance of causal weights [H, N, N]."""
    w = weights.double()
    n = w.shape[-1]
    entropy = -(w * w.clamp_min(1e-300).log()).sum(-1)
    room = torch.arange(1, n + 1).double().log()
    away = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    far = (w * away).sum(-1).mean(-1)
    return (entropy.sum(-1) / room.sum()).tolist(), w[..., 0].mean(-1).tolist(), far.tolist()


def test_every_number_is_what_it_says() -> None:
    seen = seen_model(9)
    found = head_figures(seen)
    assert found.paths == ("layers.0", "layers.1", "layers.2")
    assert found.normalised
    for i, layer in enumerate(seen.values()):
        shown = found.entropy[i], found.sink[i], found.distance[i]
        for got, want in zip(shown, by_hand(layer.trace.weights()[0]), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_entropy_is_normalised_as_the_monitor_normalises_it() -> None:
    seen = seen_model(12)
    trace = seen["layers.0"].trace
    model = torch.nn.Module()
    model.forward = lambda: torch.nn.functional.scaled_dot_product_attention(  # type: ignore[method-assign]
        trace.inputs.q, trace.inputs.k, trace.inputs.v, is_causal=True
    )
    monitor = regard.Monitor(model, every=1, rules=[])
    model()
    report = monitor.step()
    monitor.close()
    assert report is not None
    (layer,) = report.layers.values()
    torch.testing.assert_close(
        list(head_figures(seen).entropy[0]), list(layer.entropy), rtol=1e-4, atol=1e-5
    )


def test_calls_are_taken_together() -> None:
    once, twice = head_figures(seen_model(7)), head_figures(seen_model(7, calls=2))
    for name in ("entropy", "sink", "distance"):
        assert torch.allclose(torch.tensor(once.of(name)), torch.tensor(twice.of(name)))


def test_decoding_measures_from_where_the_query_stands() -> None:
    x = torch.eye(5).view(1, 1, 5, 5) * 30
    for key in range(5):
        t = regard.trace(x[:, :, [key]], x, x, mask=masks.causal())
        assert head_figures(t).distance[0][0] == pytest.approx(4 - key, abs=1e-4)


def test_rows_that_see_nothing_do_not_count() -> None:
    x = torch.zeros(1, 1, 3, 4)
    t = regard.trace(x, x, x, mask=masks.causal() & ~masks.window(0))
    found = head_figures(t)
    # Row 2 sees one key at distance 1; row 3 sees two at 1 and 2.
    assert found.distance[0][0] == pytest.approx((1 + 1.5) / 2)
    assert found.entropy[0][0] == pytest.approx(1.0)


def test_a_row_with_one_key_has_no_entropy() -> None:
    x = torch.zeros(1, 1, 1, 4)
    assert head_figures(regard.trace(x, x, x)).entropy == ((0.0,),)


def test_long_texts_are_measured_by_evenly_spaced_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 2000
    x = torch.zeros(1, 2, n, 4)
    t = regard.trace(x, x, x, mask=masks.causal())
    asked = []
    weights = type(t.second_pass).weights
    monkeypatch.setattr(
        type(t.second_pass),
        "weights",
        lambda self, x, lse, q, k: asked.append(len(q)) or weights(self, x, lse, q, k),
    )
    monkeypatch.setitem(weight_blocks.PAIRS, "cpu", 2 * 100 * n)
    assert head_figures(t).distance[0][0] == pytest.approx((n - 1) / 4, rel=0.01)
    assert sum(asked) == heads.ROWS
    assert max(asked) == 100


def test_progress_counts_layers() -> None:
    told: list[tuple[int, int]] = []
    head_figures(seen_model(4), lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_statistics_alone_give_what_they_can() -> None:
    seen = seen_model(6, keep="statistics")
    found = head_figures(seen)
    assert not found.normalised
    assert found.entropy[1] == tuple(seen["layers.1"].entropy.tolist())
    assert all(math.isnan(v) for row in found.distance for v in row)
    assert "entropy: how spread a row is, in nats" in drawn(head_grid(seen, numbers=True))
    text = drawn(head_grid(seen, ["distance"]))
    assert "distance: not known: only statistics were kept" in text


@pytest.mark.parametrize(
    ("value", "shown"), [(-0.3, "0"), (-4.6, "-5"), (-1234.5, "-99"), (7.25, "7.2"), (40.2, "40")]
)
def test_logits_fit_their_cells(value: float, shown: str) -> None:
    found = HeadFigures(("a",), ((0.0,),), ((0.0,),), ((0.0,),), logit=((value,),))
    assert read_back(drawn(head_grid(found, ["logit"], numbers=True)), 1) == [[shown]]


def test_a_head_that_saw_nothing_has_no_logit() -> None:
    x = torch.zeros(1, 1, 1, 4)
    t = regard.trace(x, x, x, mask=~masks.window(0))
    assert math.isnan(head_figures(t).logit[0][0])


def read_back(text: str, layers: int) -> list[list[str]]:
    """The numbers of each row of a grid, layer labels left out."""
    rows = text.splitlines()[2 : 2 + layers]
    return [row.split()[1:] for row in rows]


@pytest.mark.parametrize("name", ["entropy", "sink", "distance"])
def test_numbers_are_in_their_cells(name: heads.Statistic) -> None:
    seen = seen_model(9)
    shown = read_back(drawn(head_grid(seen, [name], numbers=True)), 3)
    for row, values in zip(shown, head_figures(seen).of(name), strict=True):
        percent = [f"{100 * v:.0f}" for v in values]
        assert row == (percent if name != "distance" else [f"{v:.1f}" for v in values])


def test_grids_stand_side_by_side_where_there_is_room() -> None:
    seen = seen_model(5)
    wide, narrow = (drawn(head_grid(seen, numbers=True), width) for width in (80, 40))
    assert re.match(r"entropy +sink +distance", wide)
    assert re.match(r"entropy +sink +\n", narrow)
    assert re.search(r"^distance +$", narrow, re.MULTILINE)
    rows = [line for line in narrow.splitlines() if line.startswith("2 ")]
    assert " ".join(rows).split() == next(
        line.split() for line in wide.splitlines() if line.startswith("2 ")
    )


@pytest.mark.parametrize("width", [200, 60, 30, 12, 7])
@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("draw", [drawn, coloured])
def test_many_heads_wrap_and_nothing_is_too_wide(width: int, numbers: bool, draw: object) -> None:
    assert callable(draw)
    grid = tuple(tuple((layer * 40 + head) / 480 for head in range(40)) for layer in range(12))
    found = HeadFigures(tuple(map(str, range(12))), grid, grid, grid)
    text = bare(draw(head_grid(found, ["sink"], numbers=numbers), width))
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    if numbers:
        rows = [line.split() for line in lines if re.match(r" ?\d+ +\d", line)]
        shown = [int(n) for row in rows if len(row) > 1 for n in row[1:]]
        for value in {round(100 * v) for row in grid for v in row}:
            assert value in shown


def test_layers_may_differ_in_heads() -> None:
    found = HeadFigures(("a", "b"), ((0.5,), (0.25, 1.0)), ((0.5,), (0.25, 1.0)), ((1,), (2, 3)))
    assert read_back(drawn(head_grid(found, ["sink"], numbers=True)), 2) == [
        ["50", "-"],
        ["25", "100"],
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.04, "0.0"), (9.94, "9.9"), (9.96, "10"), (999.4, "999"), (12_345, "12k")],
)
def test_distances_fit_their_cells(value: float, shown: str) -> None:
    found = HeadFigures(("a",), ((0.0,),), ((0.0,),), ((value,),))
    assert read_back(drawn(head_grid(found, ["distance"], numbers=True)), 1) == [[shown]]


def test_colours_say_what_numbers_say() -> None:
    found = HeadFigures(("a",), ((1.0, 0.0),), ((0.5, 0.5),), ((2.0, 4.0),))
    text = coloured(head_grid(found))
    row = text.splitlines()[2]
    shades = re.findall(r"48;2;(\d+);(\d+);(\d+)m", row)
    wanted = [colour(share) for share in (1.0, 0.0, 0.5, 0.5, 0.5, 1.0)]
    assert [tuple(map(int, shade)) for shade in shades] == wanted
    plain = drawn(head_grid(found)).splitlines()[2]
    assert plain.split() == ["0", "@@..", "0", "++++", "0", "++@@"]
    assert plain.isascii()


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(regard.RegardError, match="unknown statistic\n  got:      'vibes'"):
        head_grid(seen_model(3), ["vibes"])
    with pytest.raises(regard.RegardError, match="no attention was seen"):
        head_grid(regard.seen.Seen())


def test_a_trace_is_a_model_of_one_layer() -> None:
    trace: Trace = seen_model(6)["layers.1"].trace
    assert head_figures(trace).entropy[0] == head_figures(seen_model(6)).entropy[1]


def test_an_encoder_decoder_says_which_rows_are_what() -> None:
    seen = regard.seen.Seen()
    x = torch.randn(1, 2, 4, 8)
    for path in ("encoder.0", "encoder.1", "decoder.0.own", "decoder.0.memory"):
        seen.layer(path).take(regard.trace(x, x, x), 0, keep=True)
    said = drawn(head_grid(seen, plain=True))
    assert "0, 1: encoder.*" in said
    assert "3: decoder.*.memory, cross-attention" in said
