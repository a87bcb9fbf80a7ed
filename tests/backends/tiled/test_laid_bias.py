"""Biases and soft-caps inside the compiled loop, against the formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.tiled.fused import fusing
from regard.backends.tiled.loop import inner_loop
from regard.biases.bias import Bias
from regard.inputs import check

pytestmark = pytest.mark.skipif(
    inner_loop.found()[0] is None, reason="the compiled loop cannot be had here"
)

B, H, G, Q, K, D = 2, 4, 2, 150, 90, 6
"""More queries than a row tile has, two heads to a key head, and no width of a vector."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def negative(t: Tensor) -> Tensor:
    """A view that has the numbers in memory with the other sign."""
    return torch._neg_view(-t)


BIASES: dict[str, Callable[[], Bias]] = {
    "dense": lambda: biases.dense(numbers(B, H, Q, K)),
    "turned": lambda: biases.dense(numbers(B, H, K, Q).mT),
    "of heads": lambda: biases.dense(numbers(1, H, Q, K)),
    "of keys": lambda: biases.dense(numbers(B, 1, 1, K)),
    "of queries": lambda: biases.dense(numbers(1, H, Q, 1)),
    "with masked pairs": lambda: biases.dense(numbers(Q, K).masked_fill(numbers(Q, K) > 1, -1e9)),
    "rows hidden": lambda: biases.dense(numbers(Q, K).masked_fill(numbers(Q, 1) > 1, -torch.inf)),
    "half": lambda: biases.dense(numbers(Q, K).half()),
    "double": lambda: biases.dense(numbers(Q, K).double()),
    "negative": lambda: biases.dense(negative(numbers(Q, K))),
    "alibi": lambda: biases.alibi([0.5, 0.1, 0.02, 0.0]),
    "alibi, moved": lambda: biases.alibi(numbers(H).abs().double(), offset=7),
    "relative": lambda: biases.relative(numbers(H, 2 * 20 + 1)),
    "relative, shared": lambda: biases.relative(numbers(1, 5), offset=-3),
}
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "causal": {"mask": masks.causal()},
    "padding": {"mask": masks.padding(torch.tensor([40, K]))},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": negative(numbers(H, seed=5)), "softcap": 2.0, "mask": masks.window(30)},
}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("bias", [*BIASES, "none"])
def test_it_is_added_where_it_belongs(bias: str, more: str) -> None:
    options: dict[str, Any] = {"bias": BIASES[bias]() if bias in BIASES else None, **MORE[more]}
    tensors = [numbers(B, heads, n, D, seed=n) for heads, n in ((H, Q), (G, K), (G, K))]
    every: dict[str, Any] = dict.fromkeys(("mask", "score", "bias", "softcap", "sink", "scale"))
    x = check(*tensors, **every | options, dropout=0.0, training=False)
    assert fusing(x) is not None
    ours, right = (found(tensors, kind, **options) for kind in (torch.float32, torch.float64))
    for name, t in ours.items():
        torch.testing.assert_close(t.double(), right[name], atol=2e-5, rtol=2e-5, msg=name)


def found(tensors: list[Tensor], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    backend = "tiled" if dtype == torch.float32 else "reference"
    own = [t.to(dtype).requires_grad_() for t in tensors]
    t = regard.trace(*own, backend=backend, **options)
    answers = {"out": t.out, "lse": t.lse, "max_logit": t.max_logit, "entropy": t.entropy}
    pulled = t.out.sin().sum() + t.lse.masked_fill(t.lse.isinf(), 0.0).cos().sum()
    gradients = torch.autograd.grad(pulled + t.entropy.sum(), own)
    return answers | {f"gradient of {name}": g for name, g in zip("qkv", gradients, strict=True)}


def test_gradients_are_of_the_bias_that_the_call_had() -> None:
    """It is read again in the backward pass."""
    q, k, v = (numbers(1, 1, 40, 8, seed=n).requires_grad_() for n in range(3))
    table = numbers(40, 40)
    out = regard.attention(q, k, v, bias=biases.dense(table), mask=masks.causal())
    table += 1
    with pytest.raises(regard.RegardError, match="was written to before its backward pass"):
        out.sum().backward()


def test_small_logits_are_bounded_exactly() -> None:
    """Where a difference from 1 would cancel."""
    for size in (1e-6, 1e-3, 0.2, 0.3, 3.0, 50.0):
        q, k = size * numbers(1, 1, 30, 1), numbers(1, 1, 40, 1, seed=1)
        capped = regard.trace(q, k, k, softcap=1.0, scale=1.0, backend="tiled").max_logit
        want = torch.tanh(q.double() @ k.double().mT).amax(-1)
        assert ((capped - want) / want).abs().max() < 5e-7


def test_logits_far_beyond_the_cap() -> None:
    """Whose powers are no numbers."""
    q = torch.tensor([1e-3, 1.0, 30.0, 1e5, 1e30, -30.0, -1e5, -1e30])[None, None, :, None]
    one = torch.ones(1, 1, 3, 1)
    t = regard.trace(q, one, one, softcap=2.0, scale=1.0, backend="tiled")
    torch.testing.assert_close(t.max_logit, 2 * torch.tanh(q[..., 0] / 2))
