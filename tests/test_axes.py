"""Inputs with other axes than [B, H, N, D]: one head, and more than one axis of sequences."""

from __future__ import annotations

from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard import RegardError, biases, masks

every_backend = pytest.mark.parametrize("backend", ["reference", "tiled"])


@pytest.fixture(autouse=True)
def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong input reaches regard's own checks even when the shape-checking hook is on."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def table(*shape: int) -> Tensor:
    return numbers(*shape, seed=7) > -0.5


LEADS = [(2, 3), (1, 2), (2, 1, 3), (0, 2)]
MADE = {
    "table": lambda lead: {"mask": masks.keep(table(*lead, 4, 5, 6))},
    "ignored": lambda lead: {"mask": masks.ignore(table(*lead, 4, 5, 6)) & masks.causal()},
    "one for all": lambda lead: {"mask": ~masks.keep(table(*(1,) * len(lead), 4, 5, 6))},
    "some for all": lambda lead: {"mask": masks.keep(table(*lead[:-1], 1, 1, 5, 6))},
    "queries and keys": lambda lead: {"mask": masks.keep(table(5, 6))},
    "a bias": lambda lead: {"bias": biases.dense(numbers(*lead, 1, 5, 6))},
    "a bias for all": lambda lead: {"bias": biases.dense(numbers(1, 4, 5, 6))},
}


def taken(options: dict[str, Any], lead: tuple[int, ...], at: tuple[int, ...]) -> dict[str, Any]:
    """What a call of one batch entry has of the tensors of a call with more axes."""

    def one(t: Tensor) -> Tensor:
        if t.ndim <= 4:
            return t
        place = tuple(i if n > 1 else 0 for i, n in zip(at, t.shape, strict=False))
        return t[place][None]

    return {name: value.map_tensors(one) for name, value in options.items()}


@every_backend
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_more_axes_are_many_calls(lead: tuple[int, ...], make: Any, backend: str) -> None:
    q, k, v = numbers(*lead, 4, 5, 8), numbers(*lead, 2, 6, 8, seed=1), numbers(*lead, 2, 6, 3)
    options = make(lead)
    t = regard.trace(q, k, v, **options, backend=backend)
    assert_close(t.out, regard.attention(q, k, v, **options))
    assert t.out.shape == (*lead, 4, 5, 3)
    places = torch.cartesian_prod(*(torch.arange(n) for n in lead)).view(-1, len(lead)).tolist()
    for at in map(tuple, places):
        one = taken(options, lead, at)
        want = regard.trace(q[at][None], k[at][None], v[at][None], **one, backend="reference")
        for name in ("out", "lse", "max_logit", "entropy", "mean_logit"):
            assert_close(getattr(t, name)[at], getattr(want, name)[0])
        assert_close(t.weights()[at], want.weights()[0])
        assert_close(t.received()[at], want.received()[0])
        assert_close(t.map(3)[at], want.map(3)[0])
        assert_close(t.top(2).values[at], want.top(2).values[0])


@every_backend
def test_answers_have_all_axes_of_the_inputs(backend: str) -> None:
    axes = (2, 3, 4)
    q, k, v = numbers(*axes, 5, 4), numbers(*axes, 6, 4), numbers(*axes, 6, 2)
    t = regard.trace(q, k, v, mask=masks.causal(), backend=backend)
    assert t.weights(queries=[1], heads=[0, 2]).shape == (2, 3, 2, 1, 6)
    assert t.mass(0).shape == (*axes, 5)
    assert t.top(3).indices.shape == (*axes, 5, 3)
    assert t.map((2, 4)).shape == (*axes, 2, 4)


def test_a_trace_of_more_axes_is_chosen_from_by_axis() -> None:
    x = numbers(2, 3, 4, 5, 8)
    mask = masks.keep(table(2, 3, 4, 5, 5))
    t = regard.trace(x, x, x, mask=mask)
    assert t[1].lse.shape == (1, 3, 4, 5)
    assert_close(t[1].lse, t.lse[1:])
    assert_close(t[1, 2].lse, t.lse[1:, 2:])
    assert_close(t[:, [0, 2], 1:3].weights(), t.weights()[:, [0, 2], 1:3])
    assert_close(t[[1, 0], 1].received(), t.received()[[1, 0], 1:2])
    with pytest.raises(RegardError) as error:
        t[0, 0, 0, 0]
    assert "a trace is chosen from by batch and head" in str(error.value)
    assert "4 indices for axes [2, 3, 4]" in str(error.value)


def test_gradients_reach_every_axis() -> None:
    x = numbers(2, 3, 2, 5, 4).requires_grad_()
    got = torch.autograd.grad(regard.attention(x, x, x, mask=masks.causal()).square().sum(), x)
    flat = x.detach().flatten(0, 1).requires_grad_()
    want = torch.autograd.grad(
        regard.attention(flat, flat, flat, mask=masks.causal()).square().sum(), flat
    )
    assert_close(got[0].flatten(0, 1), want[0])


def test_more_axes_without_data() -> None:
    x = torch.empty(2, 3, 4, 5, 8, device="meta")
    assert regard.attention(x, x, x).shape == x.shape


@pytest.mark.compiled
def test_more_axes_compile() -> None:
    def call(x: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=masks.causal())

    x = numbers(2, 3, 4, 5, 8)
    assert_close(torch.compile(call, fullgraph=True, backend="eager")(x), call(x))


def test_lengths_of_more_axes_are_in_the_order_of_memory() -> None:
    x, lengths = numbers(2, 3, 4, 5, 8), torch.tensor([[5, 1, 2], [3, 4, 0]])
    t = regard.trace(x, x, x, mask=masks.padding(lengths.flatten()))
    assert_close((t.weights()[:, :, 0, 0] > 0).sum(-1), lengths)


SHAPE = "q [2, 3, 4, 5, 8]"
REFUSED = {
    "axes that only multiply to the same": (
        lambda x: ((x, x.transpose(0, 1), x.transpose(0, 1)), {}),
        ["different batch sizes", SHAPE, "k [3, 2, 4, 5, 8]"],
    ),
    "four axes of a mask": (
        lambda x: ((x, x, x), {"mask": masks.keep(table(3, 1, 5, 5))}),
        ["a mask of four axes could mean two things for inputs of 5", "[3, 1, 5, 5]",
         "[2, 3, H, Q, K]", "[1, H, Q, K]"],
    ),
    "four axes of a bias": (
        lambda x: ((x, x, x), {"bias": biases.dense(numbers(6, 1, 5, 5))}),
        ["a bias of four axes could mean two things for inputs of 5", "[6, 1, 5, 5]"],
    ),
    "three axes": (
        lambda x: ((x, x, x), {"mask": masks.keep(table(3, 5, 5))}),
        ["could mean several things", "[3, 5, 5]"],
    ),
    "other axes": (
        lambda x: ((x, x, x), {"mask": masks.keep(table(2, 2, 1, 5, 5))}),
        ["does not fit the call", "[2, 2, 1, 5, 5]", "[2, 3, H, Q, K]"],
    ),
    "lengths": (
        lambda x: ((x, x, x), {"mask": masks.padding([1, 2, 3])}),
        ["is for another batch size", "3 lengths for a batch of 6"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_more_axes_refuse(make: Any) -> None:
    call, words = make
    args, options = call(numbers(2, 3, 4, 5, 8))
    with pytest.raises(RegardError) as error:
        regard.attention(*args, **options)
    for word in words:
        assert word in str(error.value)


ONE_HEAD = {
    "keep": lambda t: {"mask": masks.keep(t)},
    "ignore": lambda t: {"mask": masks.ignore(~t)},
    "combined": lambda t: {"mask": masks.keep(t) & masks.window(None, None)},
    "dense": lambda t: {"bias": biases.dense(torch.zeros(t.shape).masked_fill(~t, -torch.inf))},
}


@every_backend
@pytest.mark.parametrize("make", ONE_HEAD.values(), ids=ONE_HEAD)
@pytest.mark.parametrize("B", [1, 3, 5])
def test_a_mask_of_three_axes_is_natural_for_one_head(B: int, make: Any, backend: str) -> None:
    q, k, v = numbers(B, 5, 8), numbers(B, 6, 8), numbers(B, 6, 3)
    t = table(B, 5, 6)
    got = regard.trace(q, k, v, **make(t), backend=backend)
    want = regard.trace(q, k, v, mask=masks.keep(t[:, None]), backend="reference")
    assert_close(got.out, want.out)
    assert_close(got.weights(), want.weights())
    assert_close(regard.attention(q, k, v, **make(t)), want.out)


@pytest.mark.parametrize("make", ONE_HEAD.values(), ids=ONE_HEAD)
def test_a_mask_of_three_axes_could_mean_two_things_for_heads(make: Any) -> None:
    x = numbers(3, 3, 5, 8)
    with pytest.raises(RegardError) as error:
        regard.attention(x, x, x, **make(table(3, 5, 5)))
    for word in ("several things", "[3, 5, 5]", "[B, Q, K] is t[:, None]", "[H, Q, K] is t[None]"):
        assert word in str(error.value)


def test_a_mask_of_three_axes_must_fit() -> None:
    x = numbers(3, 5, 8)
    with pytest.raises(RegardError, match=r"does not fit the call\n.*\[2, 5, 5\]"):
        regard.attention(x, x, x, mask=masks.keep(table(2, 5, 5)))


@pytest.mark.parametrize("axes", [(3, 5, 8), (2, 3, 4, 5, 8)], ids=len)
def test_files_keep_the_axes(axes: tuple[int, ...], tmp_path: Any) -> None:
    x = numbers(*axes)
    mask = masks.keep(table(*axes[:-2], 5, 5))

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(x, x, x, mask=mask)

    model = torch.nn.Sequential(Layer())
    with regard.watch(model, keep="traces") as seen:
        model(x)
    before = seen["0"].trace
    seen.save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        after = again["0"].trace
        assert after.lse.shape == before.lse.shape == axes[:-1]
        assert_close(after.weights(), before.weights())
        assert after.mask == before.mask
