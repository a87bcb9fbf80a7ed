"""Sums over texts give the estimates that their definitions say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from regard.interpret.head_scores.pairs.pair_totals import OFFSETS, REACH
from regard.interpret.head_scores.tally import ENDS, RESAMPLES, Tally, ends_of

close: Callable[..., None] = torch.testing.assert_close
EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("sets", [1, 2, 3, 41, 63, 201, 1000, RESAMPLES])
@pytest.mark.parametrize("missing", [0, 1, 30])
def test_intervals_end_at_the_quantiles_of_numbers(sets: int, missing: int) -> None:
    drawn = torch.rand(sets, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn[:missing, 2] = math.nan
    want = drawn.nanquantile(torch.tensor(ENDS, dtype=torch.float64), 0)
    close(ends_of(drawn), want, equal_nan=True, **EXACT)


def test_the_strongest_offsets_of_layers_are_their_own() -> None:
    tally, strongest = Tally(2), {"a": [1, -3], "b": [0, 64], "wide": [5, 2, -64]}
    for path, offsets in strongest.items():
        sums = torch.zeros(2, len(offsets), OFFSETS)
        for head, offset in enumerate(offsets):
            sums[:, head, offset + REACH] = torch.tensor([3.0, 5.0])
        tally.add_offsets(path, torch.arange(2), (sums, torch.full_like(sums, 10)))
    tally.settle_offsets()
    assert tally.strongest_offsets() == strongest
    for path, estimates in tally.estimates().items():
        assert estimates["offset"].value == pytest.approx([0.4] * len(strongest[path]))


def test_texts_that_tell_other_scores_of_a_layer_are_added_up_with_the_rest() -> None:
    def of(*numbers: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        names = ("entropy", "duplicate")[: len(numbers)]
        each = (torch.full((1, 2), n, dtype=torch.float64) for n in numbers)
        return {name: (n, torch.ones_like(n)) for name, n in zip(names, each, strict=True)}

    tally = Tally(4)
    for text, found in enumerate([of(0.1, 0.5), of(0.2), of(0.6), of(0.3, 0.7)]):
        tally.add("a", torch.tensor([text]), found)
        tally.add("b", torch.tensor([text]), of(0.25, 1.0))
    estimates = tally.estimates()
    assert estimates["a"]["entropy"].value == pytest.approx([0.3, 0.3])
    assert estimates["a"]["duplicate"].value == pytest.approx([0.6, 0.6])
    assert estimates["a"]["entropy"].high == pytest.approx([0.5, 0.5], abs=0.1)
    assert estimates["b"]["entropy"].value == pytest.approx([0.25, 0.25])
