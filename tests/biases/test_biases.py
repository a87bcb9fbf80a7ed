"""Each bias against its formula, in float64, one pair at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, biases, masks
from regard.values import Shape

B, H, G = 2, 4, 2
SIZES = [(5, 5), (3, 6), (6, 3), (1, 7)]
BACKENDS = ["tiled", "reference"]


def normal(*axes: int, seed: int = 0) -> Tensor:
    return torch.randn(axes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hold(
    size: tuple[int, int],
    bias,
    number: Callable[[int, int, int, int], Tensor | float],
    learned: tuple[Tensor, ...] = (),
    **kwargs,
) -> None:
    """Weights, output and gradients are those of the logits plus number(b, h, i, j)."""
    Q, K = size
    q, k, v = normal(B, H, Q, 4), normal(B, G, K, 4, seed=1), normal(B, G, K, 3, seed=2)
    pull = normal(B, H, Q, 3, seed=3)
    sources = [t.requires_grad_() for t in (q, k, *learned)]
    added = [
        torch.as_tensor(number(b, h, i, j), dtype=torch.float64)
        for b in range(B)
        for h in range(H)
        for i in range(Q)
        for j in range(K)
    ]
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(H // G, 1)) / 2
    if "softcap" in kwargs:
        logits = kwargs["softcap"] * torch.tanh(logits / kwargs["softcap"])
    logits = logits + torch.stack(added).view(B, H, Q, K)
    if "mask" in kwargs:
        logits = logits.masked_fill(~kwargs["mask"].dense(Q, K), -torch.inf)
    want = logits.softmax(-1)
    out = want @ v.repeat_interleave(H // G, 1)
    want_grads = torch.autograd.grad(out, sources, pull)
    for backend in BACKENDS:
        seen = regard.trace(q, k, v, bias=bias, backend=backend, **kwargs)
        torch.testing.assert_close(seen.weights(), want)
        torch.testing.assert_close(seen.out, out)
        for got, wanted in zip(
            torch.autograd.grad(seen.out, sources, pull), want_grads, strict=True
        ):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_alibi(size):
    slopes = normal(H, seed=4)
    shift = size[1] - size[0]
    bias = biases.alibi(slopes)
    hold(size, bias, lambda b, h, i, j: -slopes[h] * abs(j - i - shift), (slopes,))


def test_alibi_from_the_start():
    slopes = normal(H, seed=4)
    bias = biases.alibi(slopes, offset=0)
    hold((3, 6), bias, lambda b, h, i, j: -slopes[h] * abs(j - i), (slopes,))


@pytest.mark.parametrize("kind", ["floats", "float32", "bfloat16"])
def test_slopes_of_any_type_are_exact_in_a_float64_call(kind):
    """Products with distances would be rounded where slopes are narrower than the logits."""
    floats = [0.1, -0.3, -0.7, 0.017]
    given = floats if kind == "floats" else torch.tensor(floats, dtype=getattr(torch, kind))
    slopes = torch.as_tensor(given, dtype=torch.float64)
    number = lambda b, h, i, j: -slopes[h] * abs(j - i - 68)  # noqa: E731
    hold((3, 71), biases.alibi(given), number)
    # Closer than gradients are held to: a slope that was rounded moves far keys by 1e-7.
    q, k = normal(1, H, 3, 4), normal(1, H, 71, 4, seed=1)
    far = (torch.arange(71) - torch.arange(3)[:, None] - 68).abs()
    want = (q @ k.mT / 2 - slopes[:, None, None] * far).softmax(-1)
    got = regard.trace(q, k, k, bias=biases.alibi(given)).weights()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_narrow_slopes_learn_in_a_float64_call():
    slopes = torch.tensor([0.1, 0.3]).requires_grad_()
    q, k, v = normal(1, 2, 6, 4), normal(1, 2, 6, 4, seed=1), normal(1, 2, 6, 3, seed=2)
    wide = slopes.detach().double().requires_grad_()
    for given in (slopes, wide):
        regard.attention(q, k, v, bias=biases.alibi(given)).square().sum().backward()
    assert slopes.grad.dtype == torch.float32
    torch.testing.assert_close(slopes.grad, wide.grad.float())


def test_alibi_behind_a_mask_and_a_soft_cap():
    """Capped first, then biased, then masked."""
    slopes = normal(H, seed=4)
    number = lambda b, h, i, j: -slopes[h] * abs(j - i - 1)  # noqa: E731
    hold((5, 6), biases.alibi(slopes), number, (slopes,), mask=masks.causal(), softcap=0.7)


@pytest.mark.parametrize("rows", [1, H], ids=["shared", "per-head"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_relative(size, rows):
    table = normal(rows, 5, seed=5)
    shift = size[1] - size[0]

    def number(b: int, h: int, i: int, j: int) -> Tensor:
        distance = max(-2, min(2, j - i - shift))
        return table[h if rows > 1 else 0, distance + 2]

    hold(size, biases.relative(table), number, (table,))


def test_relative_from_the_start():
    table = normal(H, 3, seed=5)
    bias = biases.relative(table, offset=0)
    hold((3, 6), bias, lambda b, h, i, j: table[h, max(-1, min(1, j - i)) + 1], (table,))


def test_relative_without_reach_is_no_news():
    """One number for every distance shifts all logits alike, and weights stay as they are."""
    hold((4, 4), biases.relative(normal(H, 1)), lambda b, h, i, j: 0.0)


@pytest.mark.parametrize(
    "axes",
    [(B, H, 3, 6), (1, H, 3, 6), (B, 1, 3, 6), (1, 1, 1, 6), (B, H, 3, 1), (1, H, 1, 6)],
    ids=str,
)
def test_dense(axes):
    tensor = normal(*axes, seed=6)

    def number(b: int, h: int, i: int, j: int) -> Tensor:
        place = zip((b, h, i, j), axes, strict=True)
        return tensor[tuple(x if n > 1 else 0 for x, n in place)]

    hold((3, 6), biases.dense(tensor), number, (tensor,))


def test_dense_of_queries_and_keys():
    tensor = normal(3, 6, seed=6).requires_grad_()
    hold((3, 6), biases.dense(tensor), lambda b, h, i, j: tensor[i, j], (tensor,))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_minus_infinity_hides(backend):
    q, k, v = (normal(1, 2, 5, 4, seed=s) for s in range(3))
    hidden = torch.zeros(5, 5, dtype=torch.float64).masked_fill(
        ~masks.causal().dense(5)[0, 0], -torch.inf
    )
    want = regard.attention(q, k, v, mask=masks.causal(), backend=backend)
    got = regard.attention(q, k, v, bias=biases.dense(hidden), backend=backend)
    torch.testing.assert_close(got, want)


def test_slopes_of_a_power_of_two():
    assert biases.slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    torch.testing.assert_close(biases.slopes(16), 2.0 ** -torch.arange(0.5, 8.5, 0.5))


def test_slopes_between_powers_of_two():
    """Twelve heads: those of eight, and every other one of sixteen."""
    borrowed = [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    want = torch.tensor([*(2.0**-i for i in range(1, 9)), *borrowed])
    torch.testing.assert_close(biases.slopes(12), want)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 31])
def test_slopes_of_any_number_of_heads(heads):
    slopes = biases.slopes(heads)
    assert slopes.shape == (heads,)
    assert len(set(slopes.tolist())) == heads
    assert bool(((slopes > 0) & (slopes < 1)).all())
    x = torch.zeros(1, heads, 4, 2)
    assert regard.attention(x, x, x, bias=biases.alibi(slopes)).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_slopes_in_half_precision_know_far_places(dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.0, 2.0**-12], dtype=dtype)
    bias = biases.alibi(slopes).bind(Shape(1, 2, 1, 70_000), torch.device("cpu"))
    places = torch.arange(70_000)
    got = bias.at(places[-1:] - 69_999, places)[0, :, 0].double()
    assert not got[0].any()
    assert torch.equal(got[1], -(69_999 - places).double() * 2.0**-12)


def test_a_causal_bias_of_pytorch_is_no_bias() -> None:
    """It is a tensor whose memory nobody wrote to."""
    from torch.nn.attention.bias import causal_lower_right

    with pytest.raises(RegardError, match=r"CausalBias.*holds no numbers") as error:
        biases.dense(causal_lower_right(3, 3))
    assert "masks.from_sdpa" in str(error.value)
