"""Gradients of what a trace answers: those of the formulas written out, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, Trace, biases, masks, scores

B, H, G, Q, K, D = 2, 4, 2, 5, 7, 3

Question = Callable[[Trace], Tensor]
Formula = Callable[[Tensor, Tensor], Tensor]
"""From all logits and all weights."""

QUESTIONS: dict[str, tuple[Question, Formula]] = {
    "received": (lambda t: t.received(), lambda s, p: p.sum(-2)),
    "map": (lambda t: t.map((2, 3)), lambda s, p: pooled(p, torch.mean)),
    "map of a region": (
        lambda t: t.map(2, queries=(1, 5), keys=(2, 6), pool="sum"),
        lambda s, p: p[..., 1:5, 2:6].unfold(2, 2, 2).unfold(3, 2, 2).sum((-1, -2)),
    ),
    "largest of a map": (lambda t: t.map((2, 3), pool="max"), lambda s, p: pooled(p, torch.amax)),
    "max_logit": (lambda t: t.max_logit, lambda s, p: s.amax(-1)),
    "mean_logit": (lambda t: t.mean_logit, lambda s, p: mean(s)),
}


def pooled(p: Tensor, how: Callable[..., Tensor]) -> Tensor:
    """Into 2 × 3 cells of 5 queries and 7 keys."""
    rows = [how(part, -2) for part in (p[..., :3, :], p[..., 3:, :])]
    return torch.stack(
        [torch.stack([how(r[..., c], -1) for c in (slice(3), slice(3, 5), slice(5, 7))], -1)
         for r in rows], -2,
    )  # fmt: skip


def mean(s: Tensor) -> Tensor:
    seen = s > -torch.inf
    return s.masked_fill(~seen, 0.0).sum(-1) / seen.sum(-1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


def qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    tensors = drawn(B, H, Q, D), drawn(B, G, K, D, seed=1), drawn(B, G, K, D, seed=2)
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def logits(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    """By the formula, with the options that the cases have."""
    k = k.repeat_interleave(H // G, 1)
    s = q @ k.mT * D**-0.5
    if "softcap" in how:
        s = how["softcap"] * torch.tanh(s / how["softcap"])
    if "bias" in how:
        s = s + how["bias"]
    if how.get("causal"):
        s = s.masked_fill(torch.ones(Q, K, dtype=torch.bool).triu(K - Q + 1), -torch.inf)
    return s


def weights(s: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return s.softmax(-1)
    column = sink.view(-1, 1, 1).expand(B, H, Q, 1)
    return torch.cat([s, column], -1).softmax(-1)[..., :-1]


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("case", ["plain", "causal", "everything"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_gradients_are_those_of_the_formula(question: str, case: str, backend: str) -> None:
    ask, formula = QUESTIONS[question]
    learned = qkv()
    how: dict[str, Any] = {"causal": case != "plain"}
    more: dict[str, Any] = {"mask": masks.causal()} if case != "plain" else {}
    sink = None
    if case == "everything":
        bias, sink = drawn(1, H, Q, K, seed=3), drawn(H, seed=4)
        learned += [bias, sink]
        how |= {"softcap": 2.0, "bias": bias}
        more |= {"softcap": 2.0, "bias": biases.dense(bias), "sink": sink}
    found = ask(regard.trace(*learned[:3], backend=backend, **more))
    s = logits(*learned[:2], **how)
    want = formula(s, weights(s, sink))
    torch.testing.assert_close(found, want)
    pull = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=want.dtype)
    got = torch.autograd.grad(found, learned, pull, allow_unused=True)
    wanted = torch.autograd.grad(want, learned, pull, allow_unused=True)
    for mine, exact in zip(got, wanted, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            (zero if mine is None else mine).sum(), (zero if exact is None else exact).sum(),
            check_dtype=False,
        )  # fmt: skip
        if exact is not None:
            torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("question", QUESTIONS)
def test_gradcheck(question: str) -> None:
    ask, _ = QUESTIONS[question]
    q, k, v = (t.detach()[:1, :2, :, :2].clone().requires_grad_() for t in qkv())

    def call(q: Tensor, k: Tensor) -> Tensor:
        return ask(regard.trace(q, k, v[:1], mask=masks.causal()))

    assert torch.autograd.gradcheck(call, (q, k), check_batched_grad=True)


@pytest.mark.parametrize("question", QUESTIONS)
def test_learned_scores(question: str) -> None:
    ask, formula = QUESTIONS[question]
    q, k, w = drawn(1, 2, Q, D), drawn(1, 2, K, D, seed=1), drawn(D, seed=2)
    eye = torch.eye(D, dtype=torch.float64)
    found = ask(regard.trace(q, k, k, score=scores.additive(eye, eye, w)))
    s = (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) * w).sum(-1)
    want = formula(s, s.softmax(-1))
    for mine, exact in zip(
        torch.autograd.grad(found.sin().sum(), (q, k, w)),
        torch.autograd.grad(want.sin().sum(), (q, k, w)),
        strict=True,
    ):
        torch.testing.assert_close(mine, exact)


def test_many_tiles_in_little_memory() -> None:
    """Longer than a tile, and than the pairs that would fit."""
    q, k, v = (torch.randn(1, 1, 700, 4, dtype=torch.float64) for _ in range(3))
    q.requires_grad_()
    k.requires_grad_()
    t = regard.trace(q, k, v, mask=masks.causal() & masks.window(200))
    asked = t.received().square().sum() + t.map(7, pool="max").sum() + t.max_logit.sum()
    p = t.weights()
    s = t.logits()
    cells = p.unflatten(-1, (7, 100)).unflatten(-3, (7, 100)).amax((-1, -3))
    dense = p.sum(-2).square().sum() + cells.sum() + s.amax(-1).sum()
    for mine, exact in zip(
        torch.autograd.grad(asked, (q, k), retain_graph=True),
        torch.autograd.grad(dense, (q, k)),
        strict=True,
    ):
        torch.testing.assert_close(mine, exact)


def test_rows_that_see_nothing_and_keys_that_are_broken_leave_others_alone() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        k[:, :, -1] = torch.nan
    real = torch.ones(1, 1, Q, K, dtype=torch.bool)
    real[..., -1] = False
    real[:, :, 0] = False
    t = regard.trace(q, k, v, mask=masks.keep(real))
    seen = t.max_logit[:, :, 1:].sum() + t.mean_logit[:, :, 1:].sum()
    loss = t.received().square().sum() + t.map(2, pool="max").sum() + seen
    gq, gk = torch.autograd.grad(loss, (q, k))
    assert gq.isfinite().all()
    assert not gq[:, :, 0].any()
    assert gk[:, :, :-1].isfinite().all()
    assert not gk[:, :, -1].any()


def test_ties_share() -> None:
    q = torch.zeros(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 4, 3, dtype=torch.float64)
    t = regard.trace(q, k, k)
    (g,) = torch.autograd.grad(t.max_logit.sum(), q)
    torch.testing.assert_close(g[0, 0, 0], k[0, 0].mean(0) * 3**-0.5)


def test_large_logits_have_gradients_too() -> None:
    q, k, v = qkv(torch.float32)
    t = regard.trace(1e4 * q, k, v)
    t.received().square().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_without_gradients_nothing_is_tied() -> None:
    q, k, v = qkv()
    t = regard.trace(q, k, v)
    assert t.received().requires_grad
    assert not t.detach().received().requires_grad
    with torch.no_grad():
        assert not t.received().requires_grad
    assert not t.top(2).values.requires_grad


@pytest.mark.compiled
@pytest.mark.parametrize("case", ["plain", "everything"])
def test_the_largest_logit_of_a_full_graph(case: str) -> None:
    q, k, v = qkv()
    bias, sink = drawn(1, H, Q, K, seed=3), drawn(H, seed=4)
    learned = [q, k, v] if case == "plain" else [q, k, v, bias]

    def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        how: dict[str, Any] = {"mask": masks.causal()}
        if more:
            how |= {"bias": biases.dense(more[0]), "softcap": 2.0, "sink": sink}
        t = regard.trace(q, k, v, **how)
        return t.max_logit.sin().sum() + t.lse.sum() + t.out.sum()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, want = compiled(*learned), call(*learned)
    torch.testing.assert_close(found, want)
    for mine, exact in zip(
        torch.autograd.grad(found, learned), torch.autograd.grad(want, learned), strict=True
    ):
        torch.testing.assert_close(mine, exact)


def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv()
    found = regard.trace(q, k, v, backend="reference").received().sin().sum()
    (g,) = torch.autograd.grad(found, q, create_graph=True)
    with pytest.raises(RegardError, match=r"received\(\) is differentiable once"):
        g.sum().backward()
