"""The picture of what heads do."""

from __future__ import annotations

import pytest
import torch

from regard import interpret
from regard.models import CausalConfig, CausalModel

pytest.importorskip("matplotlib")

from regard.view.pictures.head_scores_picture import head_scores_picture


@pytest.mark.parametrize(("layers", "heads"), [(1, 2), (3, 2), (8, 2)])
def test_the_legend_of_badges_stands_below_the_axis(layers: int, heads: int) -> None:
    torch.manual_seed(0)
    model = CausalModel(CausalConfig(vocabulary=50, d_model=16, layers=layers, heads=heads)).eval()
    texts = [torch.randint(50, (1, 24))]
    found = interpret.heads(model, texts, probes=False, random=False)
    figure = head_scores_picture(found)
    figure.draw_without_rendering()
    badges, below = figure.axes[0], figure.axes[5]
    legend = badges.get_legend()
    assert legend is not None
    extent = legend.get_window_extent()
    for words in (badges.xaxis.label, below._left_title):  # type: ignore[attr-defined]
        assert not extent.overlaps(words.get_window_extent()), words.get_text()
