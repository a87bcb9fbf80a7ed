"""What attention knows of order, at lengths that are learned in seconds."""

from __future__ import annotations

import pytest

from regard import masks
from regard.lab import order
from regard.lab.apparatus.experiments import seeded
from regard.masks import Mask


@pytest.mark.parametrize("kind", order.KINDS)
def test_only_without_positions_a_layer_is_a_function_of_a_set(kind: str) -> None:
    with seeded(0):
        change = order.unordered(kind)
        masked = order.unordered(kind, masks.causal())
    assert (change < 1e-14) == (kind == "none")
    assert masked > 0.1


@pytest.mark.parametrize(
    ("kind", "mask", "can"),
    [("none", None, False), ("ALiBi", None, False), ("ALiBi", masks.causal(), True),
     ("rotary", None, True)],
)  # fmt: skip
def test_which_positions_tell_what_came_first(kind: str, mask: Mask | None, can: bool) -> None:
    with seeded(0):
        right = order.told_apart(kind, mask, 70, lambda: None)
    assert right > 0.9 if can else 0.4 < right < 0.6


@pytest.mark.parametrize(("kind", "goes_on"), [("ALiBi", True), ("rotary", False)])
def test_reading_past_the_length_of_training(kind: str, goes_on: bool) -> None:
    with seeded(0):
        losses = order.read_on(order.Speller(kind, 128), 16, 150, 16, lambda: None)
    assert losses[0] < 2.5
    worse = losses[-1] - losses[0]
    assert worse < 0.1 if goes_on else worse > 0.2


def test_sinusoids_are_those_of_the_paper() -> None:
    table = order.sinusoids(50, 8)
    # A fixed turn leads from each position to the next: the norm of the difference is the same.
    steps = (table[1:] - table[:-1]).norm(dim=1)
    assert float(steps.max() - steps.min()) < 1e-5
    assert float(table.square().sum(1).sub(4).abs().max()) < 1e-5


def test_a_result_that_is_not_supported_says_so() -> None:
    result = order.run(length=8, steps=1, sort_steps=1, batch=2)
    assert result.checks[0].holds
    assert not result.supported
    assert result.json()
