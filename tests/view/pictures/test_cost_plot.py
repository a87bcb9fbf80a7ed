"""What a model costs, drawn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.axes import Axes

from regard import RegardError, cost
from regard.view.pictures.cost_plot import cost_plot, save


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_one_model_shows_its_parts() -> None:
    figure = cost_plot([cost.preset("llama-3-8b")], "128k", device="H100")
    work, memory, reading, writing = figure.axes
    assert texts(work) == ["matrices", "pairs of tokens"]
    assert set(texts(memory)) == {
        "eager, a layer",
        "fused, a layer",
        "cache",
        "weights",
        "H100 SXM",
    }
    assert texts(reading) == ["fused", "eager"]
    found = cost.model("llama-3-8b", "128k", device="H100")
    assert texts(writing) == [f"{found.tokens_per_second():.0f} at 128k"]
    lines = {tuple(line.get_xdata()): line.get_ydata() for line in writing.lines}
    curve = next(y for x, y in lines.items() if len(x) > 2)
    assert found.tokens_per_second() in list(curve)


def test_several_models_are_named_at_their_lines_and_names_do_not_touch() -> None:
    names = ["llama-3-8b", "llama-2-7b", "mistral-7b", "qwen2.5-7b"]
    figure = cost_plot([cost.preset(name) for name in names], 3000)
    for axes in figure.axes:
        assert set(texts(axes)) == set(names)
        heights = sorted(text.get_position()[1] for text in axes.texts)
        assert min(b - a for a, b in pairwise(heights)) > 0.06
        assert heights[-1] <= 1.0


def test_pairs_cross_matrices_where_the_table_says() -> None:
    figure = cost_plot([cost.preset("gpt2")], 1024)
    pairs, matrices = (
        line.get_ydata() for line in figure.axes[0].lines if len(line.get_xdata()) > 2
    )
    lengths = next(list(x.get_xdata()) for x in figure.axes[0].lines if len(x.get_xdata()) > 2)
    at = lengths.index(1024)
    found = cost.model("gpt2", 1024)
    assert pairs[at] == pytest.approx(2 * found.part("scores").flops() / 1024)
    assert pairs[at] + matrices[at] == pytest.approx(found.flops() / 1024)


def test_the_same_plot_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save(cost_plot([cost.preset("gpt2")], "2k", dark=True), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "pairs of tokens" in (tmp_path / "a.svg").read_text()


def test_none_and_too_many_are_refused() -> None:
    with pytest.raises(RegardError, match="a plot shows a few models\n  got:      0"):
        cost_plot([], 1024)
