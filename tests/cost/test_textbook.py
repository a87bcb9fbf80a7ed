"""The breakdown that textbooks give for one layer: d = 768, 12 heads, n = 128, 1024, 8192."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from regard import cost, masks

D, HEADS = 768, 12

BY_HAND = {
    # n: (projections and output 4·n·d², scores n²·d, weighted sum n²·d, share of the n² part)
    128: (301_989_888, 12_582_912, 12_582_912, 0.077),
    1024: (2_415_919_104, 805_306_368, 805_306_368, 0.400),
    8192: (19_327_352_832, 51_539_607_552, 51_539_607_552, 0.842),
}


@pytest.mark.parametrize("n", BY_HAND)
def test_macs_of_one_layer(n: int) -> None:
    found = cost.layer(D, HEADS, n)
    projected, scores, mixed, share = BY_HAND[n]
    macs = {part.name: part.macs.dense for part in found.parts}
    assert macs["projections"] == 3 * n * D * D
    assert macs["output"] == n * D * D
    assert macs["projections"] + macs["output"] == projected == 4 * n * D * D
    assert macs["scores"] == scores == n * n * D
    assert macs["weighted sum"] == mixed == n * n * D
    assert (scores + mixed) / found.macs.dense == pytest.approx(share, abs=5e-4)
    assert found.flops() == 2 * found.macs.needed


def quadratic(n: int, width: int, heads: int, mask: masks.Mask | None = None) -> int:
    """FLOPs of pairs less those of matrices."""
    parts = cost.layer(width, heads, n, mask=mask).parts
    return sum(part.flops() if part.pairwise else -part.flops() for part in parts)


@given(width=some.integers(1, 64).map(lambda i: 16 * i), heads=some.sampled_from([1, 2, 4, 8, 16]))
def test_pairs_overtake_matrices_at_n_of_twice_the_width(width: int, heads: int) -> None:
    assert quadratic(2 * width - 1, width, heads) < 0
    assert quadratic(2 * width, width, heads) == 0
    assert quadratic(2 * width + 1, width, heads) > 0


def test_a_causal_mask_moves_that_to_four_times_the_width() -> None:
    # n(n + 1)/2 pairs: 2·d·n(n + 1)/2 = 4·n·d² at n = 4d - 1.
    assert quadratic(4 * D - 1, D, HEADS, masks.causal()) == 0
    assert quadratic(4 * D, D, HEADS, masks.causal()) > 0
