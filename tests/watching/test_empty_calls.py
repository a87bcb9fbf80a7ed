"""Calls without queries, keys or sequences: a model that runs is watched as others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard

EMPTY = [(0, 5), (2, 0)]


class Attending(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.project, self.causal = nn.Linear(16, 48), causal

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        if other is not None:
            _, k, v = self.project(other).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return out


@pytest.mark.parametrize("keep", ["statistics", "traces"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", EMPTY)
@pytest.mark.parametrize("first", [True, False])
def test_a_watch_counts_nothing_of_an_empty_batch(
    keep: Any, causal: bool, size: tuple[int, int], first: bool
) -> None:
    model, x = Attending(causal), torch.randn(2, 4, 16)
    with torch.no_grad(), regard.watch(model, keep=keep) as alone:
        model(x)
    with torch.no_grad(), regard.watch(model, keep=keep) as seen:
        for one in (torch.randn(*size, 16), x) if first else (x, torch.randn(*size, 16)):
            model(one)
    for name in ("entropy", "max_logit"):
        torch.testing.assert_close(getattr(seen[""], name), getattr(alone[""], name))


def test_rows_without_keys_see_nothing() -> None:
    model = Attending(causal=False)
    with torch.no_grad(), regard.watch(model, keep="statistics") as seen:
        out = model(torch.randn(2, 4, 16), torch.randn(2, 0, 16))
    assert not out.any()
    statistics = seen[""].statistics
    assert statistics.empty.tolist() == statistics.rows.tolist() == [8.0] * 4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("size", EMPTY)
def test_a_monitor_goes_on_past_an_empty_batch(
    causal: bool, logits: bool, size: tuple[int, int]
) -> None:
    model, x = Attending(causal), torch.randn(2, 7, 16)
    reports = []
    for batches in ([x], [x, torch.randn(*size, 16)], [torch.randn(*size, 16)]):
        options: dict[str, Any] = {"rules": (), "on_error": "raise", "logits": logits}
        with regard.Monitor(model, every=len(batches), look=1, **options) as monitor:
            for batch in batches:
                model(batch).sum().backward()
                report = monitor.step()
        assert report is not None
        reports.append(report)
    alone, both, nothing = reports
    for name in ("entropy", "sink", "max_logit", "mean_logit", "std_logit", "output", "empty"):
        want, found = (getattr(report.layers[""], name) for report in (alone, both))
        assert found == pytest.approx(want), name
        if name != "std_logit":
            assert all(number != number for number in getattr(nothing.layers[""], name)), name
