"""Calls on a CPU that come again with masks and biases of other numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.tiled.loop import inner_loop
from regard.calls import dispatch, remembered
from regard.masks.algebra import Mask

pytestmark = pytest.mark.skipif(
    inner_loop.found()[0] is None, reason="the compiled loop cannot be had here"
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(seed: int, *shape: int) -> Tensor:
    return numbers(*shape, seed=seed) > 0


MASKS: dict[str, Callable[[int], Mask]] = {
    "padding": lambda n: masks.padding(torch.tensor([20 - n, 33])),
    "nothing seen": lambda n: masks.padding(torch.tensor([0, 33 - n])),
    "all seen": lambda n: masks.padding(torch.tensor([33 - 5 * n, 33])),
    "causal padding": lambda n: masks.causal() & masks.padding(torch.tensor([20 + n, 30])),
    "documents": lambda n: masks.documents(torch.arange(33) // (4 + n)),
    "keep": lambda n: masks.keep(drawn(n, 2, 1, 33, 33)),
    "of heads": lambda n: masks.keep(drawn(n, 1, 4, 33, 33)),
    "ignore": lambda n: masks.ignore(drawn(n, 33, 33)),
}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls that are checked as if none had been before."""
    found: list[object] = []
    check = dispatch.check

    def counted(*given: Any, **options: Any) -> Any:
        found.append(given)
        return check(*given, **options)

    monkeypatch.setattr(dispatch, "check", counted)
    monkeypatch.setattr(remembered, "BOUND", {})
    return found


def tensors(seed: int, groups: int = 4, keys: int = 33) -> list[Tensor]:
    shapes = ((2, 4, 33, 8), (2, groups, keys, 8), (2, groups, keys, 8))
    return [numbers(*shape, seed=10 * seed + i) for i, shape in enumerate(shapes)]


def assert_right(t: regard.Trace, qkv: list[Tensor], mask: Mask, **options: Any) -> None:
    exact = [x.double() for x in qkv]
    right = regard.trace(*exact, mask=mask, backend="reference", **options)
    for name in ("out", "lse", "max_logit", "entropy"):
        torch.testing.assert_close(
            getattr(t, name).double(), getattr(right, name), atol=1e-5, rtol=1e-5
        )
    asked = {"weights": {"queries": [0, 7, 32]}, "received": {}}
    for question, how in asked.items():
        got, want = (getattr(each, question)(**how) for each in (t, right))
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("mask", MASKS)
def test_each_call_has_its_own_mask(mask: str, groups: int, checked: list[object]) -> None:
    for n in (0, 1, 2, 0):
        qkv, own = tensors(n, groups), MASKS[mask](n)
        assert_right(regard.trace(*qkv, mask=own), qkv, own)
    # All but the first, and those that are right by definition.
    assert len([given for given in checked if given[0].dtype == torch.float32]) == 1


def test_more_keys_than_a_tile_has(checked: list[object]) -> None:
    for n in (0, 1):
        q, k, v = tensors(n, 1, 1100)
        q, own = q[:, :, :33], masks.padding(torch.tensor([700 + n, 1090]))
        t = regard.trace(q, k, v, mask=own)
        right = regard.trace(*(x.double() for x in (q, k, v)), mask=own, backend="reference")
        torch.testing.assert_close(t.out.double(), right.out, atol=1e-5, rtol=1e-5)
    assert len(checked) == 3


def test_numbers_that_nobody_counted(checked: list[object]) -> None:
    """NumPy writes to a tensor without a word to PyTorch."""
    lengths = torch.tensor([20, 33])
    own, qkv = masks.padding(lengths), tensors(0)
    for n in (20, 5, 33):
        lengths.numpy()[0] = n
        assert_right(regard.trace(*qkv, mask=own), qkv, own)


def test_hidden_numbers_that_are_not_finite(checked: list[object]) -> None:
    own = masks.padding(torch.tensor([20, 33]))
    for bad in (0.0, torch.nan, torch.inf):
        q, k, v = tensors(0)
        k[0, :, 20:] += bad
        v[0, :, 20:] += bad
        clean = regard.trace(*tensors(0), mask=own)
        t = regard.trace(q, k, v, mask=own)
        torch.testing.assert_close(t.out, clean.out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(t.lse, clean.lse, atol=1e-6, rtol=1e-6)


def test_scale_and_softcap_are_those_of_the_call(checked: list[object]) -> None:
    own, qkv = masks.padding(torch.tensor([20, 33])), tensors(0)
    options: list[dict[str, Any]] = [{}, {"scale": 0.1}, {"softcap": 1.0}, {}, {"scale": 0.1}]
    for each in options:
        assert_right(regard.trace(*qkv, mask=own, **each), qkv, own, **each)


def test_gradients_come_after_calls_without(checked: list[object]) -> None:
    own, qkv = masks.padding(torch.tensor([20, 33])), tensors(0)
    for _ in range(2):
        regard.trace(*qkv, mask=own)
        learned = [t.clone().requires_grad_() for t in qkv]
        regard.trace(*learned, mask=own).out.sum().backward()
        right = [t.double().requires_grad_() for t in qkv]
        regard.trace(*right, mask=own, backend="reference").out.sum().backward()
        for ours, want in zip(learned, right, strict=True):
            assert ours.grad is not None
            assert want.grad is not None
            torch.testing.assert_close(ours.grad.double(), want.grad, atol=1e-5, rtol=1e-5)


def test_a_mask_that_does_not_fit_is_refused(checked: list[object]) -> None:
    qkv = tensors(0)
    for _ in range(2):
        regard.trace(*qkv, mask=masks.padding(torch.tensor([20, 33])))
        with pytest.raises(regard.RegardError):
            regard.trace(*qkv, mask=masks.padding(torch.tensor([20, 33, 1])))
        with pytest.raises(regard.RegardError):
            regard.trace(*qkv, mask=masks.padding(torch.tensor([20, -1])))


def test_watchers_see_the_mask_of_each_call(checked: list[object]) -> None:
    class Attends(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
            return regard.attention(q, k, v, mask=mask)

    model = Attends()
    for n in (0, 1, 2):
        qkv, own = tensors(n), MASKS["padding"](n)
        with regard.watch(model, keep="traces") as seen:
            out = model(*qkv, own)
        (layer,) = seen.values()
        torch.testing.assert_close(out, layer.trace.out)
        assert_right(layer.trace, qkv, own)


BIASED: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "dense": lambda n, N: {"bias": biases.dense(numbers(1, 4, N, N, seed=n))},
    "of keys": lambda n, N: {"bias": biases.dense(numbers(2, 1, 1, N, seed=n).double())},
    "alibi": lambda n, N: {"bias": biases.alibi(numbers(4, seed=n).abs())},
    "relative": lambda n, N: {"bias": biases.relative(numbers(4, 9, seed=n))},
    "causal": lambda n, N: {
        "bias": biases.alibi(numbers(4, seed=n).abs()), "mask": masks.causal(), "softcap": 3.0,
    },
    "padded": lambda n, N: {
        "bias": biases.relative(numbers(1, 9, seed=n)),
        "mask": masks.padding(torch.tensor([N - 5 - n, N])),
    },
}  # fmt: skip


@pytest.mark.parametrize("N", [33, 300])
@pytest.mark.parametrize("bias", BIASED)
def test_each_call_has_its_own_bias(bias: str, N: int, checked: list[object]) -> None:
    for n in (0, 1, 2, 0):
        q, k, v = numbers(3, 2, 4, N, 8, seed=n)
        options = BIASED[bias](n, N)
        exact = [x.double() for x in (q, k, v)]
        right = regard.trace(*exact, backend="reference", **options)
        t = regard.trace(q, k, v, **options)
        for name in ("out", "lse", "max_logit", "entropy"):
            got, want = getattr(t, name).double(), getattr(right, name)
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
        weights = t.weights(queries=[0, N - 1]).double()
        torch.testing.assert_close(weights, right.weights(queries=[0, N - 1]), atol=1e-5, rtol=1e-5)
        out = regard.attention(q, k, v, **options)
        torch.testing.assert_close(out.double(), right.out, atol=2e-5, rtol=1e-5)
    if bias in ("alibi", "relative", "causal"):
        assert len([given for given in checked if given[0].dtype == torch.float32]) == 2


def test_a_bias_that_learns_is_looked_at_each_time(checked: list[object]) -> None:
    q, k, v = numbers(3, 1, 4, 20, 8)
    for learns in (False, True, False, True):
        slopes = torch.full((4,), 0.25, requires_grad=learns)
        out = regard.attention(q, k, v, bias=biases.alibi(slopes))
        assert out.requires_grad == learns
    with pytest.raises(regard.RegardError, match="one slope per head"):
        regard.attention(q, k, v, bias=biases.alibi([0.1] * 3))


def test_numbers_with_the_other_sign(checked: list[object]) -> None:
    q, k, v = numbers(3, 1, 4, 20, 8)
    for ask in (regard.attention, regard.trace):
        for slopes in (torch.full((4,), 0.2), torch._neg_view(torch.full((4,), -0.2))):
            ask(q, k, v, bias=biases.alibi(slopes))
    own = [
        biases.alibi(t) for t in (torch.full((4,), 0.2), torch._neg_view(torch.full((4,), -0.2)))
    ]
    one, other = (regard.trace(q, k, v, bias=bias).out for bias in own)
    torch.testing.assert_close(one, other)
    one, other = (
        regard.trace(q, k, v, bias=biases.dense(t)).out
        for t in (torch.ones(20, 20).tril(), torch._neg_view(-torch.ones(20, 20).tril()))
    )
    torch.testing.assert_close(one, other)


def test_dropout_is_not_forgotten(checked: list[object]) -> None:
    q, k, v = numbers(3, 2, 4, 33, 8)
    own = masks.padding(torch.tensor([20, 33]))
    for options in ({}, {"bias": biases.alibi([0.1] * 4)}):
        kept = regard.trace(q, k, v, mask=own, **options).out
        dropped = regard.trace(q, k, v, mask=own, dropout=0.5, training=True, **options).out
        assert not torch.allclose(kept, dropped, atol=1e-2)
        with regard.watch(torch.nn.Identity()):
            seen = regard.attention(q, k, v, mask=own, dropout=0.5, training=True, **options)
        assert not torch.allclose(kept, seen, atol=1e-2)
        again = regard.attention(q, k, v, mask=own, dropout=0.5, **options)
        torch.testing.assert_close(again, kept)


def test_many_threads_each_with_its_own_mask() -> None:
    def run(n: int) -> None:
        qkv = tensors(n)
        for i in range(20):
            own = masks.padding(torch.tensor([(7 * n + i) % 34, 33]))
            bias = biases.alibi(numbers(4, seed=n + i).abs())
            t = regard.trace(*qkv, mask=own, bias=bias)
            exact = [x.double() for x in qkv]
            right = regard.trace(*exact, mask=own, bias=bias, backend="reference")
            torch.testing.assert_close(t.out.double(), right.out, atol=1e-5, rtol=1e-5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))
