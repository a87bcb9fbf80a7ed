"""The kernel that computes all gradients at once, against float64: it runs on Hopper where it is
quicker, and here with small tiles wherever it can."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.backends.reference import ReferencePass
from tests.parity import cases
from tests.parity.cases import Case, Sizes, assert_conforms, observed

pytestmark = pytest.mark.interpreted

SIZES = Sizes(B=2, H=4, G=2, Q=37, K=37, D=8, E=16)


@pytest.fixture(params=[True, False], ids=["copied", "atomics"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that several programs add to each query."""
    from regard.backends.triton import backward
    from regard.backends.triton.tuning import AtOnce

    how = AtOnce(16, 16, warps=4, stages=1, described=request.param)
    monkeypatch.setattr(backward, "at_once", lambda x: how)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "case",
    [
        Case("none", dtype=torch.bfloat16, sizes=SIZES),
        Case("causal_window", extra="softcap", dtype=torch.bfloat16, sizes=SIZES),
        # Padding and documents hide NaN, which must not reach queries by way of the sums.
        Case("causal_padding", dtype=torch.float16, sizes=SIZES),
        Case("documents", extra="sink", dtype=torch.bfloat16, sizes=SIZES),
        Case("keep", extra="all", dtype=torch.float32, sizes=SIZES),
    ],
    ids=str,
)
def test_all_gradients_at_once(case: Case) -> None:
    from regard.backends.triton import Triton

    inputs, learned = case.build()
    assert_conforms(case, observed(Triton(), inputs, learned, ReferencePass()), ReferencePass())


@pytest.mark.usefixtures("small_tiles")
def test_past_the_last_key_there_is_nothing() -> None:
    """Very small logits alone: of the zeros that fill up the last tile, weights would be huge."""
    q, k, v = (torch.randn(1, 1, 19, 8, requires_grad=True, device=cases.DEVICE) for _ in "qkv")
    far = regard.biases.dense(torch.full((1, 1, 19, 19), -1e4, device=cases.DEVICE))
    grads = [
        torch.autograd.grad(
            regard.attention(q, k, v, bias=far, backend=backend).square().sum(), (q, k, v)
        )
        for backend in ("triton", "reference")
    ]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-2 * float(want.abs().max()))


def test_where_order_must_be_fixed_or_registers_are_few_there_are_two_kernels() -> None:
    from regard.backends.triton import arguments
    from regard.backends.triton.prepared.common_calls import call
    from regard.backends.triton.tuning import at_once

    narrow, wide = (call(torch.bfloat16, width, 256) for width in (64, 128))
    token = arguments.stands_for.set(90)
    try:
        assert at_once(narrow) is not None
        assert at_once(wide) is None
        assert at_once(call(torch.float32, 64, 256)) is None
        torch.use_deterministic_algorithms(True)
        assert at_once(narrow) is None
    finally:
        torch.use_deterministic_algorithms(False)
        arguments.stands_for.reset(token)
    assert at_once(narrow) is None
