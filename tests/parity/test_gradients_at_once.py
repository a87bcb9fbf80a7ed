"""The kernel that computes all gradients at once, against float64: it runs on Hopper where it is
quicker, and here with small tiles wherever it can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard.backends.reference import ReferencePass
from tests.parity import cases
from tests.parity.agreement import assert_close
from tests.parity.cases import Case, Sizes, assert_conforms, observed

pytestmark = pytest.mark.interpreted

SIZES = Sizes(B=2, H=4, G=2, Q=37, K=37, D=8, E=16)


@pytest.fixture(params=[True, False], ids=["copied", "atomics"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that several programs add to each query."""
    from regard.backends.triton import backward
    from regard.backends.triton.settings.tuning import AtOnce

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


ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
WIDE = Sizes(B=2, H=4, G=2, Q=300, K=300, D=128, E=128)


@pytest.mark.skipif(not ON_HOPPER, reason="its instructions are those of Hopper alone")
@pytest.mark.parametrize(
    "case",
    [
        Case("none", extra="sink", dtype=torch.bfloat16, sizes=WIDE),
        Case("causal_window", dtype=torch.bfloat16, sizes=WIDE),
        Case("causal_window", dtype=torch.float16, sizes=replace(WIDE, Q=77)),
        Case("causal_padding", dtype=torch.float16, sizes=replace(WIDE, D=96, E=112)),
        Case("prefix", dtype=torch.bfloat16, sizes=replace(WIDE, G=4)),
        Case("nothing", dtype=torch.bfloat16, sizes=WIDE),
        Case("none", extra="dropout", dtype=torch.bfloat16, sizes=WIDE),
        Case("causal_padding", extra="dropout", dtype=torch.float16, sizes=replace(WIDE, Q=77)),
    ],
    ids=str,
)
def test_on_hopper(case: Case) -> None:
    from regard.backends.triton import Triton
    from regard.backends.triton.settings.tuning import at_once

    inputs, learned = case.build()
    how = at_once(inputs)
    assert how is not None
    assert how.hopper
    assert_conforms(case, observed(Triton(), inputs, learned, ReferencePass()), ReferencePass())


@pytest.mark.skipif(not ON_HOPPER, reason="its instructions are those of Hopper alone")
@pytest.mark.parametrize("kind", ["distances", "documents"])
def test_numbers_that_are_not_learned_on_hopper(kind: str) -> None:
    """Slopes (those that are learned have a kernel that owns queries), and documents one after the
    other. The gradient of the output is one number for all."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 333, 128, generator=source) for _ in range(3))
    how: dict[str, Any] = {"mask": regard.masks.causal()}
    if kind == "distances":
        how["bias"] = regard.biases.alibi(torch.tensor([0.5, 0.01]).cuda())
    else:
        how["mask"] &= regard.masks.documents(torch.arange(333).cuda() // 70)
    plain, exact = (torch.bfloat16, "reference"), (torch.float64, "reference")
    found = []
    for dtype, backend in ((torch.bfloat16, "triton"), plain, exact):
        inputs = [t.to(torch.bfloat16).to(dtype).cuda().requires_grad_() for t in (q, k, v)]
        out = regard.attention(*inputs, **how, backend=backend)
        found.append([t.cpu() for t in torch.autograd.grad(out.sum(), inputs)])
    for name, *results in zip("qkv", *found, strict=True):
        assert_close(name, *results)


def test_where_order_must_be_fixed_or_registers_are_few_there_are_two_kernels() -> None:
    from regard.backends.triton import arguments
    from regard.backends.triton.prepared.common_calls import call
    from regard.backends.triton.settings.tuning import at_once

    narrow, wide = (call(torch.bfloat16, width, 256) for width in (64, 128))
    token = arguments.stands_for.set(90)
    try:
        assert at_once(narrow) is not None
        on_hopper = at_once(wide)
        assert on_hopper is not None
        assert on_hopper.hopper
        assert at_once(call(torch.bfloat16, 256, 256)) is None
        assert at_once(call(torch.float32, 64, 256)) is None
        torch.use_deterministic_algorithms(True)
        assert at_once(narrow) is None
    finally:
        torch.use_deterministic_algorithms(False)
        arguments.stands_for.reset(token)
    assert at_once(narrow) is None
