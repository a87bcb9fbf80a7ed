"""Each score against its formula, in float64, one pair at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard import masks, scores
from regard.scores.comparison import both_longest

B, H, G, Q, K = 2, 4, 2, 3, 5
BACKENDS = ["tiled", "reference"]


def normal(*axes: int, seed: int = 0) -> Tensor:
    return torch.randn(axes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(q: Tensor, k: Tensor, pair: Callable[[int, int, Tensor, Tensor], Tensor]) -> Tensor:
    """Weights [B, H, Q, K] from a logit of head h, key head g and two vectors."""
    group = q.shape[1] // k.shape[1]
    logits = [
        pair(h, h // group, q[b, h, i], k[b, h // group, j])
        for b in range(q.shape[0])
        for h in range(q.shape[1])
        for i in range(q.shape[2])
        for j in range(k.shape[2])
    ]
    return torch.stack(logits).view(*q.shape[:3], k.shape[2]).softmax(-1)


def hold(q: Tensor, k: Tensor, score, pair, learned: tuple[Tensor, ...] = (), **kwargs) -> None:
    """Weights, output and gradients of `score` are those of the formula `pair`."""
    v, pull = normal(B, G, K, 3, seed=8), normal(B, H, Q, 3, seed=9)
    sources = [t.requires_grad_() for t in (q, k, *learned)]
    want = by_hand(q, k, pair)
    out = want @ v.repeat_interleave(H // G, 1)
    want_grads = torch.autograd.grad(out, sources, pull)
    for backend in BACKENDS:
        seen = regard.trace(q, k, v, score=score, backend=backend, **kwargs)
        torch.testing.assert_close(seen.weights(), want)
        torch.testing.assert_close(seen.out, out)
        for got, wanted in zip(
            torch.autograd.grad(seen.out, sources, pull), want_grads, strict=True
        ):
            torch.testing.assert_close(got, wanted)


@pytest.fixture
def q() -> Tensor:
    return normal(B, H, Q, 6)


@pytest.fixture
def k() -> Tensor:
    return normal(B, G, K, 6, seed=1)


def test_scaled_dot_is_the_default(q, k):
    for score in (None, scores.scaled_dot()):
        hold(q, k, score, lambda h, g, a, b: (a * b).sum() / math.sqrt(6))


def test_dot(q, k):
    hold(q, k, scores.dot(), lambda h, g, a, b: (a * b).sum())


@pytest.mark.parametrize("score", [None, scores.dot(), scores.scaled_dot()], ids=repr)
def test_scale_stands_in_for_the_scores_own(q, k, score):
    hold(q, k, score, lambda h, g, a, b: 0.3 * (a * b).sum(), scale=0.3)


def test_scale_may_be_whole_negative_or_zero(q, k):
    hold(q, k, None, lambda h, g, a, b: 2 * (a * b).sum(), scale=2)
    hold(q, k, None, lambda h, g, a, b: -2 * (a * b).sum(), scale=-2.0)
    hold(q, k, None, lambda h, g, a, b: 0 * (a * b).sum(), scale=0.0)


def test_general(k):
    q, W = normal(B, H, Q, 4), normal(4, 6, seed=2)
    hold(q, k, scores.general(W), lambda h, g, a, b: a @ W @ b, (W,))


def test_general_per_head_and_scaled(k):
    q, W = normal(B, H, Q, 4), normal(H, 4, 6, seed=2)
    hold(q, k, scores.general(W), lambda h, g, a, b: 0.5 * (a @ W[h] @ b), (W,), scale=0.5)


def test_general_with_the_identity_is_dot(q, k):
    score = scores.general(torch.eye(6, dtype=torch.float64))
    v = normal(B, G, K, 3)
    same = regard.attention(q, k, v, score=scores.dot())
    torch.testing.assert_close(regard.attention(q, k, v, score=score), same)


def test_additive(k):
    q = normal(B, H, Q, 4)
    Wq, Wk, w = normal(4, 3, seed=2), normal(6, 3, seed=3), normal(3, seed=4)
    score = scores.additive(Wq, Wk, w)
    hold(q, k, score, lambda h, g, a, b: w @ torch.tanh(a @ Wq + b @ Wk), (Wq, Wk, w))


def test_additive_per_head(k):
    """Query matrices and w are one per query head, key matrices one per key head."""
    q = normal(B, H, Q, 4)
    Wq, Wk, w = normal(H, 4, 3, seed=2), normal(G, 6, 3, seed=3), normal(H, 3, seed=4)
    score = scores.additive(Wq, Wk, w)
    hold(q, k, score, lambda h, g, a, b: w[h] @ torch.tanh(a @ Wq[h] + b @ Wk[g]), (Wq, Wk, w))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())


def test_cosine(q, k):
    hold(q, k, scores.cosine(0.2), lambda h, g, a, b: cosine(a, b) / 0.2)
    hold(q, k, scores.cosine(), lambda h, g, a, b: cosine(a, b))


def test_cosine_with_a_learned_temperature(q, k):
    one, each = torch.tensor(0.4, dtype=torch.float64), normal(H, seed=5).abs() + 0.1
    hold(q, k, scores.cosine(one), lambda h, g, a, b: cosine(a, b) / one, (one,))
    hold(q, k, scores.cosine(each), lambda h, g, a, b: cosine(a, b) / each[h], (each,))


def test_cosine_does_not_see_lengths(q, k):
    v = normal(B, G, K, 3)
    out = regard.attention(q, k, v, score=scores.cosine(0.1))
    longer = regard.attention(7 * q, k / 3, v, score=scores.cosine(0.1))
    torch.testing.assert_close(longer, out)


def test_distance(q, k):
    hold(q, k, scores.distance(), lambda h, g, a, b: -(a - b).square().sum() / 2)
    hold(q, k, scores.distance(1.5), lambda h, g, a, b: -(a - b).square().sum() / (2 * 1.5**2))


def test_distance_not_squared(q, k):
    score = scores.distance(0.5, squared=False)
    hold(q, k, score, lambda h, g, a, b: -(a - b).square().sum().sqrt() / 0.5)


def test_distance_is_nadaraya_watson():
    """Attention by distance is kernel regression: a Gaussian kernel's weighted mean."""
    x, at = normal(20, 1), normal(4, 1, seed=1)
    y = x.sin()
    kernel = torch.exp(-((at - x.mT) ** 2) / (2 * 0.3**2))
    want = (kernel @ y) / kernel.sum(1, keepdim=True)
    torch.testing.assert_close(regard.attention(at, x, y, score=scores.distance(0.3)), want)


@pytest.mark.parametrize("squared", [True, False])
def test_distance_of_a_query_on_its_key_has_a_finite_gradient(squared):
    x = normal(1, 1, 4, 3).requires_grad_()
    for backend in BACKENDS:
        score = scores.distance(squared=squared)
        out = regard.trace(x, x, x, score=score, backend=backend).out
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_may_be_of_another_type(dtype, q, k):
    W = normal(6, 6, seed=2)
    v = normal(B, G, K, 3)
    want = regard.attention(q, k, v, score=scores.general(W))
    low = regard.attention(*(t.to(dtype) for t in (q, k, v)), score=scores.general(W))
    assert low.dtype == dtype
    # A few roundings of numbers that, like logits here, reach some ten in size.
    torch.testing.assert_close(low.double(), want, rtol=0, atol=64 * torch.finfo(dtype).eps)


def test_scores_print_as_the_call_that_makes_them():
    assert repr(scores.dot()) == "dot()"
    assert repr(scores.scaled_dot()) == "scaled_dot()"
    assert repr(scores.cosine(0.1)) == "cosine(0.1)"
    assert repr(scores.general(torch.ones(3, 4))) == "general(<float32 [3, 4]>)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cosines_of_vectors_that_are_nothing_or_large(dtype: torch.dtype) -> None:
    k = torch.tensor([[1.0, 2], [0, 0], [2, -1], [6e4, 6e4], [6e4, -6e4]], dtype=dtype)
    weights = regard.trace(k[3:4], k, k, score=scores.cosine()).weights()[0]
    cosines = torch.tensor([3 / 10**0.5, 0.0, 1 / 10**0.5, 1.0, 0.0])
    torch.testing.assert_close(weights.float(), cosines.softmax(0), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_that_are_no_numbers_teach_nothing(backend: str) -> None:
    q, k, v = (normal(1, 1, n, 4, seed=n) for n in (2, 5, 5))
    k[:, :, 3:] = math.nan
    Wq, Wk, w = (normal(*axes, seed=9).requires_grad_() for axes in ((4, 3), (4, 3), (3,)))
    k.requires_grad_()
    for score, learned in (
        (scores.additive(Wq, Wk, w), [Wq, Wk, w, k]),
        (scores.cosine(0.5), [k]),
    ):
        out = regard.attention(q, k, v, mask=masks.prefix(3), score=score, backend=backend)
        for grad in torch.autograd.grad(out.sum(), learned):
            assert grad.isfinite().all()
            assert grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_heads_have_no_weights(backend: str) -> None:
    q, k = normal(B, H, Q, 4), normal(B, G, K, 4)
    score = scores.additive(normal(4, 3), normal(4, 3), normal(H, 3))
    trace = regard.trace(q, k, k, score=score, backend=backend)
    assert trace.weights(heads=[]).shape == (B, 0, Q, K)
    assert trace[:, []].received().shape == (B, 0, K)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_longest_finite_vectors_are_found(dtype: torch.dtype) -> None:
    def wanted(t: Tensor) -> float:
        lengths = t.double().norm(dim=-1)
        return float(lengths[lengths.isfinite()].max())

    q, k = torch.randn(2, 3, 5, 4).to(dtype), torch.randn(2, 1, 7, 4).to(dtype)
    assert both_longest(q, k) == pytest.approx((wanted(q), wanted(k)))
    q[0, 0, 0], k[1, 0, 3, 2] = math.nan, math.inf
    assert both_longest(q, k) == pytest.approx((wanted(q), wanted(k)))
    assert both_longest(q[:, :, :0], k) == pytest.approx((0, wanted(k)))


def test_vectors_whose_squares_are_beyond_float32_count() -> None:
    q = torch.tensor([[1e30, 1e30], [3.0, 4.0]])
    assert both_longest(q, q[1:]) == pytest.approx((2**0.5 * 1e30, 5))
    assert both_longest(q.bfloat16(), q[1:].bfloat16())[0] == pytest.approx(2**0.5 * 1e30, rel=0.01)
