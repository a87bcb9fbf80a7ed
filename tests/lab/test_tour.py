"""The textbook's numbers come out, and a number that does not is told."""

from __future__ import annotations

import math

import pytest

from regard.lab import tour
from regard.lab.apparatus.experiments import Result
from regard.lab.reports.tour import checks


@pytest.fixture(scope="module")
def result() -> Result:
    return tour.run(widths=(16, 1024), samples=8)


def test_every_number_of_the_textbook_comes_out(result: Result) -> None:
    assert result.supported, result.verdict
    e = math.exp(0.5)
    assert result.numbers["paris"]["weights"] == pytest.approx(
        [1 / (2 + e), 1 / (2 + e), e / (2 + e)], rel=1e-6
    )
    assert result.numbers["cost"][2]["pairs"] == 4 * 8192**2 * 512
    assert result.numbers["heads"]["parameters"] == 4 * 512**2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("paris", {"weights": [0.11, 0.56, 0.33]}),
        ("static", {"logits": [[2.0, 4, 4], [4.0, 8, 7], [4.0, 8, 16]]}),
        ("senses", {"apple": {"phone": [3.0, 1.0], "eat": [3.0, 1.0]}}),
        ("heads", {"queries": [1, 8, 10, 32]}),
        ("causal", {"weights": [[0.5, 0.5], [0.5, 0.5]]}),
    ],
)
def test_another_number_is_told(result: Result, name: str, change: dict[str, object]) -> None:
    changed = {**result.numbers, name: {**result.numbers[name], **change}}
    assert [check.holds for check in checks(changed)].count(False) == 1
