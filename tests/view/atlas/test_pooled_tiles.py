"""Tiles that kernels pool as they go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard
from regard import masks
from regard.traces import Trace
from regard.view.atlas import Atlas, Map
from regard.view.atlas.tiles import decoded, pooled, tile


def trace(n: int, mask: masks.Mask | None, backend: str | None = None) -> Trace:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, n, 16)
    return regard.trace(q, k, v, mask=mask, backend=backend)


def as_on_a_card(t: Trace) -> Map:
    """Whose second pass is asked as the one of a card is."""
    return Atlas.of(replace(t, backend="triton"))[0]


@pytest.mark.parametrize("n", [512, 700, 1100])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(300)])
def test_they_hold_what_reading_rows_gives(n: int, mask: masks.Mask | None) -> None:
    t = trace(n, mask)
    of = as_on_a_card(t)
    for level in (1, 2, 3):
        cell = 1 << level
        found = of.pooled(1, range(n), range(n), cell)
        assert found is not None
        for mine, read in zip(
            found, pooled(Atlas.of(t)[0], 1, range(n), range(n), cell), strict=True
        ):
            torch.testing.assert_close(mine, read, rtol=1e-4, atol=1e-7)


def test_a_tile_of_a_card_is_no_draft() -> None:
    t = trace(1100, masks.causal())
    for row, column in ((0, 0), (1, 0), (2, 2)):
        exact = decoded(tile(Atlas.of(t)[0], 0, 1, row, column, exact=True))
        found = decoded(tile(as_on_a_card(t), 0, 1, row, column))
        assert found.read == 0
        torch.testing.assert_close(found.mean, exact.mean, rtol=0.06, atol=1e-6)
        torch.testing.assert_close(found.most, exact.most, rtol=0.06, atol=1e-6)


def test_nan_is_read_pair_by_pair() -> None:
    t = trace(600, masks.causal())
    t.inputs.q[0, 0, 300] = torch.nan
    broken = regard.trace(t.inputs.q, t.inputs.k, t.inputs.v, mask=masks.causal())
    of = as_on_a_card(broken)
    assert of.pooled(0, range(600), range(600), 4) is None
    assert of.pooled(1, range(600), range(600), 4) is not None
    assert decoded(tile(of, 0, 2, 0, 0)).mean.isfinite().all()


def test_other_quantities_and_joined_steps_are_read() -> None:
    of = as_on_a_card(trace(600, masks.causal()))
    plain = Atlas.of(trace(600, masks.causal()))[0]
    assert tile(of, 0, 2, 0, 0, quantity="value") == tile(plain, 0, 2, 0, 0, quantity="value")
    many = replace(of, calls=range(2))
    assert many.pooled(0, range(4), range(4), 2) is None


@pytest.mark.interpreted
def test_the_kernels_pool_them() -> None:
    t = trace(100, masks.causal(), backend="triton")
    of = Atlas.of(t)[0]
    found = of.pooled(1, range(100), range(100), 8)
    assert found is not None
    read = pooled(of, 1, range(100), range(100), 8)
    for mine, other in zip(found, read, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-7)
