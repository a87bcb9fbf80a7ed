"""Traces in the graph of autograd: what is seen of a model trains it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard import RegardError, Trace
from tests.watching.left_behind import nothing_in, nothing_in_the_process

N, WIDTH, HEADS = 6, 8, 2
ANSWERS: dict[str, tuple[Callable[[Trace], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "lse": (lambda t: t.lse, lambda s, p: s.logsumexp(-1)),
    "entropy": (lambda t: t.entropy, lambda s, p: -torch.special.xlogy(p, p).sum(-1)),
    "weights": (lambda t: t.weights(queries=[2, 3]), lambda s, p: p[..., 2:4, :]),
    "mass": (lambda t: t.mass([0, 1]), lambda s, p: p[..., :2].sum(-1)),
    "received": (lambda t: t.received(), lambda s, p: p.sum(-2)),
    "map": (lambda t: t.map(3), lambda s, p: p.unfold(-2, 2, 2).unfold(-2, 2, 2).mean((-1, -2))),
    "max_logit": (lambda t: t.max_logit, lambda s, p: s.amax(-1)),
    "mean_logit": (lambda t: t.mean_logit, lambda s, p: s.mean(-1)),
}


class Layer(nn.Module):
    """Projections and one call of somebody's attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.qkv, self.how = nn.Linear(WIDTH, 3 * WIDTH), how

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.how == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = regard.attention(q, k, v)
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, how: str = "sdpa", reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = Layer(how), Layer(how), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.second(self.first(x))
        x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return checkpoint(self.second, x, use_reentrant=self.reentrant)


def made(how: str = "sdpa", reentrant: bool | None = None) -> Model:
    torch.manual_seed(0)
    return Model(how, reentrant).double()


def given(seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, N, WIDTH, generator=g, dtype=torch.float64)


def grads(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return dict(zip(dict(model.named_parameters()), found, strict=True))


def same(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    for name, exact in want.items():
        mine = got[name]
        zero = torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(
            zero if mine is None else mine,
            torch.zeros_like(zero if mine is None else mine) if exact is None else exact,
        )


@pytest.mark.parametrize("how", ["sdpa", "regard"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_loss_on_what_was_seen_is_a_loss_of_the_model(answer: str, how: str) -> None:
    ask, formula = ANSWERS[answer]
    model, x = made(how), given()
    with regard.watch(model, keep="traces", gradients=True) as seen:
        out = model(x)
    torch.testing.assert_close(out, model(x))
    loss = out.square().mean() + ask(seen["second"].trace).sin().sum()
    hidden = model.first(x)
    q, k, _ = model.second.split(hidden)
    s = q @ k.mT * q.shape[-1] ** -0.5
    want = model.second(hidden).square().mean() + formula(s, s.softmax(-1)).sin().sum()
    same(grads(model, loss), grads(model, want))


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights: bool) -> None:
    torch.manual_seed(0)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attn(x, x, x, need_weights=need_weights, average_attn_weights=False)

    model, x = Wrapped().double(), given()
    with regard.watch(model, keep="traces", gradients=True) as seen:
        model(x)
    received = seen["attn"].trace.received()
    _, weights = model.attn(x, x, x, average_attn_weights=False)
    got, want = (grads(model, t.square().sum()) for t in (received, weights.sum(-2)))
    same(got, want)


def test_hugging_face_models_learn_where_to_look() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.randint(3, 32, (4, 12))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    before = None
    watch = regard.watch(model, keep="traces", layers="*.1.self_attn", heads=1, gradients=True)
    seen = watch.attach()
    for _ in range(25):
        model(ids)
        weights = seen["model.layers.1.self_attn"].trace.weights()[..., 1:, :]
        previous = weights.diagonal(0, 2, 3).mean()
        now = previous.item()
        before = now if before is None else before
        optimiser.zero_grad()
        (-previous.log()).backward()
        optimiser.step()
        seen.clear()
    watch.detach()
    assert before is not None
    assert before < 0.4
    assert now > 0.8
    nothing_in(model)
    nothing_in_the_process()


def test_without_it_traces_are_detached() -> None:
    model, x = made(), given()
    with regard.watch(model, keep="traces") as seen:
        model(x)
    t = seen["first"].trace
    for tensor in (t.lse, t.entropy, t.received(), t.max_logit, t.weights(), t.inputs.q):
        assert not tensor.requires_grad


def test_two_watches_each_get_what_they_asked_for() -> None:
    model, x = made(), given()
    with (
        regard.watch(model, keep="traces", gradients=True) as tied,
        regard.watch(model, keep="traces") as loose,
    ):
        model(x)
    assert tied["first"].trace.lse.requires_grad
    assert not loose["first"].trace.lse.requires_grad


def test_statistics_are_the_same() -> None:
    model, x = made(), given()
    with regard.watch(model, keep="traces", gradients=True) as tied:
        model(x)
    with regard.watch(model) as plain:
        model(x)
    assert repr(tied) == repr(plain)
    assert not tied["first"].entropy.requires_grad


def test_gradient_checkpointing() -> None:
    model, x = made(reentrant=False), given()
    plain = made()
    with regard.watch(model, keep="traces", gradients=True) as seen:
        out = model(x)
        got = grads(model, out.sum() + seen["second"].trace.received().square().sum())
    assert seen["second"].calls == 1
    with regard.watch(plain, keep="traces", gradients=True) as seen:
        out = plain(x)
    same(got, grads(plain, out.sum() + seen["second"].trace.received().square().sum()))


def test_gradient_checkpointing_of_hugging_face_models() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    ids, found = torch.randint(3, 32, (2, 9), generator=torch.Generator().manual_seed(0)), []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with regard.watch(model, keep="traces", gradients=True) as seen:
            out = model(ids, use_cache=False).logits
            asked = seen["model.layers.1.self_attn"].trace.received().square().sum()
            (out.square().mean() + asked).backward()
        found.append([p.grad for p in model.parameters()])
        assert seen["model.layers.1.self_attn"].calls == 1
    torch.testing.assert_close(*found)


def test_jagged_tensors() -> None:
    class Jagged(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    parts = [torch.randn(n, 2, 4, requires_grad=True) for n in (3, 5)]
    model = Jagged()
    with regard.watch(model, keep="traces", gradients=True) as seen:
        nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        model(nested.transpose(1, 2))
    got = torch.autograd.grad(seen[""].trace.received().square().sum(), parts)
    alone = [part.transpose(0, 1) for part in parts]
    received = [(x @ x.mT / 2).softmax(-1).sum(-2).square().sum() for x in alone]
    torch.testing.assert_close(got, torch.autograd.grad(sum(received), parts))


def test_what_runs_without_autograd_is_refused() -> None:
    model, x = made(reentrant=True), given().requires_grad_()
    with (
        pytest.raises(RegardError) as error,
        regard.watch(model, keep="traces", gradients=True),
    ):
        model(x)
    assert "use_reentrant=False" in str(error.value)
    assert "first" in str(error.value)
    nothing_in(model)
    nothing_in_the_process()
    # A run without autograd is one that nobody learns from.
    plain = made()
    with torch.no_grad(), regard.watch(plain, keep="traces", gradients=True) as seen:
        plain(x)
    assert not seen["first"].trace.lse.requires_grad


@pytest.mark.parametrize(
    ("how", "do"),
    [
        ({}, 'add keep="traces"'),
        ({"keep": "statistics"}, 'add keep="traces"'),
        ({"keep": "traces", "spill": "run.regard"}, "leave spill= out"),
    ],
)
def test_what_cannot_be_is_refused(how: dict[str, Any], do: str) -> None:
    with pytest.raises(RegardError) as error:
        regard.watch(made(), gradients=True, **how)
    assert do in str(error.value)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_a_score_mod_learns_is_refused() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(()))

        def forward(self, q: Tensor) -> Tensor:
            slope = self.slope
            return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + slope * (i - j))

    model, q = Biased(), torch.randn(1, 1, 4, 8)
    with (
        pytest.raises(RegardError, match="score_mod learns"),
        regard.watch(model, keep="traces", gradients=True),
    ):
        model(q)


def test_nothing_holds_the_graph_once_what_was_seen_is_gone() -> None:
    model, x = made(), given()
    with regard.watch(model, keep="traces", gradients=True) as seen:
        out = model(x)
    held = weakref.ref(seen["first"].trace.inputs.q)
    watch = weakref.ref(seen)
    del out
    seen.clear()
    gc.collect()
    assert held() is None
    del seen
    gc.collect()
    assert watch() is None
    nothing_in(model)
    nothing_in_the_process()


def test_files_take_the_numbers(tmp_path: Any) -> None:
    model, x = made(), given()
    with regard.watch(model, keep="traces", gradients=True) as seen:
        model(x)
    seen.save(tmp_path / "run.regard")
    with regard.load(tmp_path / "run.regard") as again:
        kept = again["first"].trace.received()
    torch.testing.assert_close(kept, seen["first"].trace.received().detach())
