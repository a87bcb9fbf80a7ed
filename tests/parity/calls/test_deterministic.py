"""What the Triton kernels do when PyTorch is asked for deterministic algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, biases
from regard.backends.tiled import TiledPass
from regard.biases import Bias
from tests.parity import cases

pytestmark = pytest.mark.interpreted


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def numbers(*shape: int) -> Tensor:
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=source).to(cases.DEVICE).requires_grad_()


def qkv() -> list[Tensor]:
    return [numbers(2, 2, 5, 8) for _ in range(3)]


ADDED_BY_MANY = {
    "a relative table": lambda: biases.relative(numbers(2, 5)),
    "a shared dense bias": lambda: biases.dense(numbers(1, 2, 5, 5)),
}


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("learned", ADDED_BY_MANY)
def test_a_gradient_without_a_fixed_order_is_refused(learned: str) -> None:
    bias = ADDED_BY_MANY[learned]()
    reason = f"its gradient of {learned} is added up by atomics, in no fixed order"
    with pytest.raises(RegardError, match=reason) as error:
        regard.attention(*qkv(), bias=bias, backend="triton")
    assert "'tiled'" in str(error.value)
    plan = regard.plan(*qkv(), bias=bias, statistics=True)
    assert plan.backend == "tiled"
    assert plan.refusals["triton"] == [reason]
    with torch.no_grad():
        assert regard.plan(*qkv(), bias=bias, backend="triton").backend == "triton"


@pytest.mark.parametrize("learned", ADDED_BY_MANY)
def test_it_is_taken_where_order_does_not_matter(learned: str) -> None:
    assert regard.plan(*qkv(), bias=ADDED_BY_MANY[learned](), backend="triton").backend == "triton"


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize(
    "bias",
    [
        biases.alibi(numbers(2)),
        biases.dense(numbers(2, 2, 5, 5)),
        biases.relative(numbers(2, 5).detach()),
    ],
    ids=["alibi", "own-dense", "fixed-table"],
)
def test_gradients_in_a_fixed_order_are_given(bias: Bias) -> None:
    def gradients() -> list[Tensor]:
        t = regard.trace(*(tensors := qkv()), bias=bias, backend="triton")
        return list(torch.autograd.grad(t.out.square().sum() + t.entropy.sum(), tensors))

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize(("pool", "by_tiled"), [("mean", True), ("sum", True), ("max", False)])
def test_maps_are_added_up_in_a_fixed_order(
    pool: Literal["mean", "sum", "max"], by_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def pooled(*args: Any) -> Tensor:
        asked.append(args[-1])
        return pooled_by_tiled(*args)

    pooled_by_tiled = TiledPass.pooled
    monkeypatch.setattr(TiledPass, "pooled", pooled)
    q, k, v = (t.detach() for t in qkv())
    t = regard.trace(q, k, v, backend="triton")
    torch.testing.assert_close(
        t.map(2, pool=pool), regard.trace(q, k, v, backend="tiled").map(2, pool=pool)
    )
    assert asked == [pool, pool][: 1 + by_tiled]
