"""Why scores are divided by √d, at a reduced size."""

from __future__ import annotations

import pytest
import torch

from regard import RegardError
from regard.lab import scaling
from regard.lab.apparatus.experiments import seeded
from regard.lab.reports.scaling import of_gradients


@pytest.fixture(scope="module")
def numbers() -> dict:
    return dict(
        scaling.run(seed=1, widths=(16, 64, 256, 1024), samples=128, steps=60, seeds=1).numbers
    )


def test_variance_grows_as_the_width(numbers: dict) -> None:
    assert numbers["variance_slope"] == pytest.approx(1, abs=0.05)


def test_only_the_root_keeps_entropy(numbers: dict) -> None:
    entropy = {
        name: [fresh[name]["entropy"] for fresh in numbers["fresh"]] for name in scaling.scales(1)
    }
    assert entropy["undivided"][-1] < 0.06
    assert max(entropy["by √d"]) - min(entropy["by √d"]) < 0.05
    assert 0.8 < entropy["by √d"][-1] < 0.95
    assert entropy["by d"][-1] > 0.999


def test_gradients_of_the_median_query_vanish_on_both_sides(numbers: dict) -> None:
    widest = numbers["fresh"][-1]
    root = widest["by √d"]["gradient"]
    assert widest["undivided"]["gradient"] < 0.2 * root
    assert widest["by d"]["gradient"] < 0.05 * root
    assert widest["undivided"]["gradient_mean"] > 3 * root


def test_training_learns_soonest_with_the_root(numbers: dict) -> None:
    raw, root, whole = (run["accuracy"] for run in numbers["trained"].values())
    late = slice(-10, None)
    assert sum(root[late]) / 10 > 0.9
    assert sum(whole[late]) / 10 < 0.8
    assert sum(raw[late]) / 10 < 0.5


def test_the_monitor_warns_of_undivided_scores_alone() -> None:
    warned = {}
    for name, scale in scaling.scales(1024).items():
        with seeded(0):
            found = scaling.train(scaling.Lookup(1024, scale), 10, lambda: None)
        warned[name] = [warning["rule"] for warning in found["warnings"]]
    assert warned == {"undivided": ["logit explosion"], "by √d": [], "by d": []}


def test_one_width_says_nothing_of_growth() -> None:
    with pytest.raises(RegardError, match=r"at which widths of a head to measure\n  got: +\[64\]"):
        scaling.run(widths=(64,))


def test_jacobian_size_is_that_of_the_jacobian() -> None:
    p = torch.randn(5, dtype=torch.float64).softmax(0)
    whole = torch.diag(p) - torch.outer(p, p)
    assert torch.allclose(scaling.jacobian_size(p), whole.norm())


def test_variance_after_scaling_and_why_narrow_heads_have_larger_gradients_undivided(
    numbers: dict,
) -> None:
    for d, fresh in zip(numbers["widths"], numbers["fresh"], strict=True):
        assert fresh["by √d"]["variance"] == pytest.approx(fresh["variance"] / d)
        assert fresh["by √d"]["variance"] == pytest.approx(1, rel=0.3)
        assert fresh["by d"]["variance"] == pytest.approx(1 / d, rel=0.3)
    narrow = numbers["fresh"][0]
    raw, root = narrow["undivided"], narrow["by √d"]
    # Four times from the factor, √16; without it they are about alike.
    assert 0.7 < raw["gradient"] / root["gradient"] / 4 < 1.8
    assert "which is √d = 4 times" in of_gradients(numbers)
