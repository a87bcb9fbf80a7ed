"""Heads and values narrower than the tiles that hold them, launched again and again.

Such kernels were assembled with an address that nothing had set (`launches/assembler.py`): most
launches went well, so one does not tell."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import masks
from tests.parity import cases


@pytest.mark.interpreted
@pytest.mark.parametrize("statistics", [True, False], ids=["trace", "attention"])
@pytest.mark.parametrize(("width", "values"), [(24, 10), (20, 12)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_launches(dtype: torch.dtype, width: int, values: int, statistics: bool) -> None:
    torch.manual_seed(width)
    times = 300 if cases.DEVICE == "cuda" else 1
    for n in (37, 50):
        shapes = (2, 4, n, width), (2, 2, 37, width), (2, 2, 37, values)
        q, k, v = (torch.randn(shape, device=cases.DEVICE).to(dtype) for shape in shapes)
        wide = (t.double() for t in (q, k, v))
        want = regard.attention(*wide, mask=masks.causal(), backend="reference")
        answer = regard.trace if statistics else regard.attention
        for _ in range(times):
            found = answer(q, k, v, mask=masks.causal(), backend="triton")
            out = found.out if isinstance(found, regard.Trace) else found
            torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
