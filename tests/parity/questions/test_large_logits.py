"""Logits too large for float32: questions about one pair still get one answer, in every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.exactness import SURE
from regard.seen import Statistics
from tests.parity import cases
from tests.parity.answers import NEAR, assert_one_answer

TRITON = pytest.param("triton", marks=pytest.mark.interpreted)
every_tracer = pytest.mark.parametrize("backend", ["reference", "tiled", TRITON])


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64).to(cases.DEVICE, dtype)


def qkv(size: float, dtype: torch.dtype = torch.float32, n: int = 40) -> list[Tensor]:
    q, k = numbers(1, 4, n, 16, seed=1, dtype=dtype), numbers(1, 2, n, 16, seed=2, dtype=dtype)
    return [size * q, size * k, numbers(1, 2, n, 16, seed=3, dtype=dtype)]


EXTRAS: dict[str, Any] = {
    "plain": lambda size: {},
    "causal": lambda size: {"mask": masks.causal()},
    "softcap": lambda size: {"softcap": 30.0},
    "sink": lambda size: {"sink": size * size * numbers(4, seed=4)},
    "bias": lambda size: {"bias": biases.relative(size * size * numbers(4, 5, seed=5))},
}


@every_tracer
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("size", [1.0, 1e2, 3e3, 1e5])
def test_all_questions_agree(backend: str, size: float, extra: str) -> None:
    if (backend, cases.DEVICE) == ("triton", "cuda") and size > 1e4:
        pytest.skip("fused multiply-add rounds logits beyond 10^9 otherwise than their maximum")
    # Triton's interpreter takes its time for every key that is sorted in.
    n = 12 if (backend, cases.DEVICE) == ("triton", "cpu") else 40
    assert_one_answer(regard.trace(*qkv(size, n=n), **EXTRAS[extra](size), backend=backend))


@every_tracer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e2, 1e8])
def test_all_questions_agree_in_other_precisions(
    backend: str, size: float, dtype: torch.dtype
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("its kernels compute in float32")
    if (backend, cases.DEVICE) == ("triton", "cuda") and size > 1e4:
        pytest.skip("fused multiply-add rounds logits beyond 10^9 otherwise than their maximum")
    assert_one_answer(regard.trace(*qkv(size, dtype), backend=backend))


@every_tracer
@pytest.mark.parametrize("size", [1e2, 3e3])
def test_answers_are_those_of_float64(backend: str, size: float) -> None:
    q, k, v = qkv(size)
    t = regard.trace(q, k, v, mask=masks.causal(), backend=backend)
    exact = regard.trace(*(x.double() for x in (q, k, v)), mask=masks.causal(), backend="reference")
    for ask in (
        lambda t: t.weights(),
        lambda t: t.mass([0, 3]),
        lambda t: t.received(),
        lambda t: t.map(7),
        lambda t: t.top(3).values,
    ):
        torch.testing.assert_close(ask(t).double(), ask(exact), **NEAR)


@every_tracer
def test_weights_of_large_logits_are_differentiable(backend: str) -> None:
    """In a collapsed head, whose keys are nearly one, large logits have weights of every size."""
    q, k, v = qkv(1e2)
    k = k[:, :, :1] + 1e-3 * k

    def gradients(*tensors: Tensor, backend: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        t = regard.trace(*leaves, mask=masks.causal(), backend=backend)
        pull = numbers(40, 3, seed=6).to(q)
        (t.weights(keys=[0, 5, 9]) * pull).sum().add(t.mass([1, 2]).square().sum()).backward()
        return [x.grad for x in leaves[:2]]  # type: ignore[misc]

    wanted = gradients(*(x.double() for x in (q, k, v)), backend="reference")
    for got, want in zip(gradients(q, k, v, backend=backend), wanted, strict=True):
        # The lse is differentiated through the forward pass's own float32 weights.
        error = (got.double() - want).norm() / want.norm()
        assert error < 0.01


@every_tracer
@pytest.mark.parametrize("size", [3e3, 1e5])
def test_statistics_count_no_more_than_shares(backend: str, size: float) -> None:
    t = regard.trace(*qkv(size), backend=backend)
    found = Statistics.of(t)
    assert (found.first <= found.sound * (1 + SURE)).all()
    # Rows that are no numbers are not counted.
    torch.testing.assert_close(found.first, t.mass(0).nansum((0, 2)), rtol=1e-3, atol=1e-3)


@every_tracer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [40, 512])
@pytest.mark.parametrize("size", [1e5, 1e7])
def test_no_row_passes_for_an_empty_one(
    backend: str, size: float, n: int, dtype: torch.dtype
) -> None:
    """Right, or NaN where a fused multiply-add rounds logits otherwise than their maximum."""
    q, k, v = (numbers(1, 2, n, 64, seed=seed).to(dtype) for seed in (1, 2, 3))
    t = regard.trace(size * q, size * k, v, backend=backend)
    right = v[0][torch.arange(2)[:, None], (q.double() @ k.double().mT).argmax(-1)[0]][None]
    broken = t.out.isnan().any(-1)
    assert torch.equal(broken, ~t.lse.isfinite())
    assert not (t.lse == -math.inf).any()
    if (backend, cases.DEVICE) != ("triton", "cuda"):
        assert not broken.any()
    near = (t.out - right).abs().amax(-1) < 0.05
    assert (near | broken).float().mean() > 0.95


@every_tracer
def test_logits_that_overflow_are_no_numbers(backend: str) -> None:
    """Float64 could tell them; but the output of that row is NaN, and so are its weights."""
    if (backend, cases.DEVICE) == ("triton", "cuda"):
        pytest.skip("fused multiply-add rounds logits beyond 10^9 otherwise than their maximum")
    q, k, v = qkv(1.0)
    q[:, :, 3] *= 1e30
    k[:, :, 5:] *= 1e10
    t = regard.trace(q, k, v, mask=masks.prefix(20), backend=backend)
    assert t.out[:, :, 3].isnan().all()
    assert t.weights()[:, :, 3, :20].isnan().all()
    assert t.mass(0)[:, :, 3].isnan().all()
    assert not t.weights()[:, :, 3, 20:].any()
    others = [i for i in range(40) if i != 3]
    assert t.weights(queries=others).isfinite().all()
    assert t.lse[:, :, others].abs().max() < math.inf
