"""The comparison that trained models are held to can fail."""

from __future__ import annotations

import pytest
import torch

from tests.real.agreement import agree


def test_what_is_further_off_than_plain_arithmetic_is_refused() -> None:
    exact = torch.rand(50, 50, dtype=torch.float64)
    plain = exact.float()
    agree(plain, plain, exact)
    off = plain.clone()
    off[3, 4] += 3e-6
    with pytest.raises(AssertionError, match=r"off by .*e-06, where plain arithmetic is by .*e-08"):
        agree(off, plain, exact)
    with pytest.raises(AssertionError):
        agree(plain[:1], plain, exact)
