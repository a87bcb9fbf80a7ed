"""Weights of the bundled model against what cutting edges does, at a reduced size."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from regard.lab import faithfulness


@pytest.fixture(scope="module")
def result() -> Any:
    return faithfulness.run(texts=2, tokens=7)


def test_every_layer_and_method_is_compared(result: Any) -> None:
    numbers = result.numbers
    assert {name: len(rows) for name, rows in numbers["layers"].items()} == dict.fromkeys(
        ("weights", "norms", "gradients", "position"), 8
    )
    for softmax in ("before", "after"):
        names = [row["name"] for row in numbers["whole"][softmax]]
        assert names[:4] == list(faithfulness.METHODS)
        assert [row["control"] for row in numbers["whole"][softmax]] == [False] * 4 + [True] * 3
    # To first order, a weight times its derivative is what removing the value does.
    assert min(row["value"] for row in numbers["layers"]["gradients"]) > 0.5
    rollout = faithfulness._row(numbers, "after", "rollout")["correlation"]
    gradients = faithfulness._row(numbers, "after", "gradients")["correlation"]
    assert rollout < gradients
    assert len(result.panels) == 3
    assert result.json()


def test_weights_that_decide_would_not_support_the_claim(result: Any) -> None:
    numbers = copy.deepcopy(dict(result.numbers))
    for rows in numbers["whole"].values():
        rows[0] |= {"correlation": 0.99, "low": 0.98, "high": 1.0}
    checks = faithfulness._checks(numbers)
    assert checks[0].holds
    assert not checks[1].holds
    assert (
        not checks[2].holds or faithfulness._row(numbers, "after", "position")["correlation"] > 0.49
    )
