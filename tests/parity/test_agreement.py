"""The comparison that all parity tests rest on can fail."""

import math

import pytest
import torch

from tests.parity.agreement import assert_close


def test_a_plain_error_is_allowed_and_a_larger_one_is_not() -> None:
    truth = torch.linspace(1, 2, 9, dtype=torch.float64)
    plain = (truth + 1e-3).float()
    assert_close("x", (truth + 3e-3).float(), plain, truth)
    with pytest.raises(AssertionError, match=r"x: whole error 0\.015, allowed 0\.012"):
        assert_close("x", (truth + 5e-3).float(), plain, truth)


def test_one_bad_entry_is_not_drowned_by_many_good_ones() -> None:
    truth = torch.linspace(1, 2, 1000, dtype=torch.float64)
    plain = (truth + 1e-3).float()
    got = truth.float()
    got[500] += 1e-2
    with pytest.raises(AssertionError, match=r"x: entry error 0\.01, allowed 0\.008"):
        assert_close("x", got, plain, truth)


def test_one_wrong_entry_among_many_is_found() -> None:
    truth = torch.zeros(1000, dtype=torch.float64)
    got = torch.zeros(1000)
    got[777] = 1e-6
    with pytest.raises(AssertionError):
        assert_close("x", got, torch.zeros(1000), truth)


def test_nan_never_passes() -> None:
    truth = torch.ones(3, dtype=torch.float64)
    got = torch.tensor([1.0, math.nan, 1.0])
    with pytest.raises(AssertionError):
        assert_close("x", got, torch.ones(3), truth)


def test_infinities_must_stand_in_the_same_places() -> None:
    truth = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    assert_close("x", torch.tensor([1.0, -math.inf]), truth, truth)
    with pytest.raises(AssertionError, match="NaN and infinities differ"):
        assert_close("x", torch.tensor([1.0, -3e38]), truth, truth)
    with pytest.raises(AssertionError, match="NaN and infinities differ"):
        assert_close("x", torch.tensor([1.0, math.inf]), truth, truth)


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close("x", torch.ones(1, 3), torch.ones(3), torch.ones(3, dtype=torch.float64))
