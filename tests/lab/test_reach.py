"""How far each kind of layer reaches, at distances that are learned in seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.lab import reach
from regard.lab.apparatus.experiments import seeded

LIMIT = reach.LAYERS * (reach.TAPS - 1)


def trained(kind: str, distance: int, steps: int) -> float:
    with seeded(0):
        return reach.train(reach.Namer(kind, reach.WIDTH), distance, steps, lambda: None)


def test_convolution_names_what_it_reaches_and_nothing_farther() -> None:
    assert trained("convolution", LIMIT // 2, 120) > 0.95
    assert trained("convolution", LIMIT + 1, 120) < 0.4


def test_attention_learns_where_a_recurrence_does_not() -> None:
    assert trained("attention", 40, 220) > 0.9
    assert trained("recurrence", 40, 220) < 0.6
    assert trained("recurrence", 4, 120) > 0.95


def test_what_arrives_from_afar() -> None:
    with seeded(0):
        models = {kind: reach.Namer(kind, reach.WIDTH) for kind in reach.KINDS}
        assert reach.influence(models["convolution"], LIMIT) > 0
        assert reach.influence(models["convolution"], LIMIT + 1) == 0
        near, far = (reach.influence(models["recurrence"], n) for n in (4, 64))
        assert far < 1e-3 * near
        near, far = (reach.influence(models["attention"], n) for n in (4, 64))
        assert far > 0.02 * near


@pytest.mark.parametrize("kind", reach.KINDS)
def test_path_is_the_least_number_of_layers_that_connects(kind: str) -> None:
    if kind == "convolution":
        reached = [n for n in range(1, 40) if reach.path(kind, n) <= reach.LAYERS]
        assert reached[-1] == LIMIT
    assert reach.path(kind, 30) == {"convolution": 8, "recurrence": 30, "attention": 1}[kind]


def test_attention_overtakes_the_work_of_a_recurrence_at_its_width() -> None:
    width = reach.TIMED_WIDTH
    work = {n: [reach.work(k, n) for k in ("attention", "recurrence")] for n in (width, 2 * width)}
    assert work[width][0] == work[width][1]
    assert work[2 * width][0] > work[2 * width][1]


def test_the_work_of_a_convolution_is_what_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer = reach.Convolution(8).layers[0]
    with FlopCounterMode(display=False) as counted:
        layer(torch.randn(1, 8, 20 + reach.TAPS - 1))
    assert counted.get_total_flops() == 2 * reach.work("convolution", 20, 8)


def test_a_result_that_is_not_supported_says_so() -> None:
    result: Any = reach.run(distances=(4, 24), steps=1, lengths=(8, 16))
    assert not result.supported
    assert 'attention learns from farther away than both" does not hold' in result.verdict
    assert result.json()
