"""Attention by hand with other axes, precisions and biases than the usual, against n×n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard

Q, K, D = 5, 6, 4


class Attends(nn.Module):
    """A model that is one call."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call(*tensors)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def looked_at(call: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> regard.Trace:
    model = Attends(call)
    torch.manual_seed(1)
    want = model(*tensors)
    torch.manual_seed(1)
    with regard.watch(model, keep="traces", **options) as seen:
        got = model(*tensors)
    assert torch.equal(got, want)
    return seen[""].trace


def assert_weights(trace: regard.Trace, logits: Tensor, atol: float = 1e-6) -> None:
    want = logits.double().softmax(-1).expand(trace.weights().shape)
    torch.testing.assert_close(trace.weights().double(), want, atol=atol, rtol=1e-5)
    got, want = (t - t.amax(-1, keepdim=True) for t in (trace.logits().double(), logits.double()))
    torch.testing.assert_close(got, want.expand(got.shape), atol=1e-5, rtol=1e-4)


def test_without_a_batch_and_without_heads() -> None:
    q, k = normal(Q, D), normal(K, D, seed=1)
    trace = looked_at(lambda q, k: (q @ k.T).softmax(-1) @ k, q, k)
    assert_weights(trace, q @ k.T)
    assert trace.inputs.shape == (1, 1, Q, K)


def test_a_batch_without_heads_and_heads_without_a_batch() -> None:
    q, k = normal(3, Q, D), normal(3, K, D, seed=1)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return torch.bmm((torch.bmm(q, k.mT) * 0.5).softmax(-1), k)

    assert_weights(looked_at(attend, q, k), (q @ k.mT * 0.5)[:, None])
    tokens = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k)]
    assert_weights(looked_at(attend, *tokens), (q @ k.mT * 0.5)[None])


def heads_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


HEADS_FIRST: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "permuted": (heads_first, "hbqd,hbkd->hbqk"),
    "copied": (lambda x: heads_first(x).contiguous(), "hbqd,hbkd->hbqk"),
    "folded": (lambda x: heads_first(x).reshape(-1, *x.shape[1::2]), "nqd,nkd->nqk"),
    "copied and folded": (
        lambda x: heads_first(x).contiguous().view(-1, *x.shape[1::2]), "nqd,nkd->nqk"
    ),
    "by the product": (lambda x: x, "bqhd,bkhd->hbqk"),
    "tokens first": (lambda x: heads_first(x.transpose(0, 1).contiguous().transpose(0, 1)),
                     "hbqd,hbkd->hbqk"),
}  # fmt: skip


@pytest.mark.parametrize("how", HEADS_FIRST)
def test_heads_that_stand_before_the_batch_are_heads(how: str) -> None:
    """What each token holds are heads, wherever the axis went: not the sequences of a batch."""
    laid, letters = HEADS_FIRST[how]
    q, k = normal(2, Q, 3, D), normal(2, K, 3, D, seed=1)
    queries, keys, scores = letters.replace("->", ",").split(",")

    def attend(q: Tensor, k: Tensor) -> Tensor:
        k = laid(k)
        weights = torch.einsum(letters, laid(q), k).softmax(-1)
        return torch.einsum(f"{scores},{keys}->{queries}", weights, k)

    trace = looked_at(attend, q, k)
    assert trace.inputs.shape == (2, 3, Q, K)
    assert_weights(trace, torch.einsum("bqhd,bkhd->bhqk", q, k))


def test_one_query() -> None:
    q, k = normal(D), normal(K, D, seed=1)
    trace = looked_at(lambda q, k: torch.softmax(k @ q, 0) @ k, q, k)
    assert_weights(trace, (k @ q)[None, None, None])


def test_one_token() -> None:
    """Axes of length 1 say nothing by their length."""
    q = normal(2, 3, 1, D)
    trace = looked_at(lambda q: (q @ q.mT).softmax(-1) @ q, q)
    assert trace.inputs.shape == (2, 3, 1, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_key_heads_that_query_heads_share(groups: int) -> None:
    q, k, v = normal(2, groups, 3, Q, D), normal(2, groups, K, D, seed=1), normal(2, groups, K, 7)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bgrid,bgjd->bgrij", q, k).softmax(-1)
        return torch.einsum("bgrij,bgje->bgrie", weights, v)

    trace = looked_at(attend, q, k, v)
    assert_weights(trace, torch.einsum("bgrid,bgjd->bgrij", q, k).flatten(1, 2))
    assert trace.inputs.k.shape[1] == groups
    assert trace.out.shape == (2, 3 * groups, Q, 7)
    torch.testing.assert_close(trace.out, attend(q, k, v).flatten(1, 2))


def test_key_heads_that_are_repeated_stay_heads() -> None:
    q, k = normal(2, Q, 2 * 3, D), normal(2, K, 2, 1, D, seed=1)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        k = k.expand(-1, -1, -1, 3, -1).flatten(2, 3).transpose(1, 2)
        return (q.transpose(1, 2) @ k.mT).softmax(-1) @ k

    trace = looked_at(attend, q, k)
    assert trace.inputs.shape == (2, 6, Q, K)
    assert_weights(trace, torch.einsum("bqhd,bkhd->bhqk", q, k[..., 0, :].repeat_interleave(3, 2)))


def test_rotary_embeddings_that_are_computed_with_a_product() -> None:
    x, frequencies = normal(2, 3, Q, D), normal(D // 2, seed=1)

    def turned(x: Tensor) -> Tensor:
        positions = torch.arange(Q)[None, None, :].float()
        angles = (frequencies[None, :, None] @ positions).transpose(1, 2)
        angles = torch.cat((angles, angles), -1)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    trace = looked_at(lambda x: (turned(x) @ turned(x).mT).softmax(-1) @ x, x)
    assert_weights(trace, turned(x) @ turned(x).mT)


def test_an_image_whose_keys_have_two_axes() -> None:
    x = normal(2, D, 3, 4)

    def attend(x: Tensor) -> Tensor:
        s = torch.einsum("bdhw,bdxy->bhwxy", x, x).flatten(-2).softmax(-1)
        return torch.einsum("bhwk,bdk->bdhw", s, x.flatten(2))

    tokens = x.flatten(2).mT
    assert_weights(looked_at(attend, x), (tokens @ tokens.mT)[:, None])


def test_a_soft_cap_and_learned_biases() -> None:
    q, bias, scale = normal(2, 3, Q, D), normal(3, Q, Q, seed=1), normal(3, 1, 1, seed=2)

    def logits(q: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        return 5 * torch.tanh(q @ q.mT / 5) + 2 * bias

    def attend(q: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
        s = 5.0 * torch.tanh((q @ q.mT) / 5.0) + bias
        return torch.add(s, bias).softmax(-1) @ q

    assert_weights(looked_at(attend, q, bias, scale), logits(q, bias, scale))
    both = q @ q.mT + torch.einsum("bhid,hijd->bhij", q, bias[..., None].expand(3, Q, Q, D))
    trace = looked_at(
        lambda q, b, _: (
            torch.einsum("bhid,hijd->bhij", q, b[..., None].expand(3, Q, Q, D)) + q @ q.mT
        ).softmax(-1) @ q,
        q, bias, scale,
    )  # fmt: skip
    assert_weights(trace, both)


def test_padding_and_a_future() -> None:
    q, padded = normal(2, 3, Q, D), torch.arange(Q) >= torch.tensor([3, Q])[:, None]
    future = torch.ones(Q, Q).triu(1).bool()

    def attend(q: Tensor) -> Tensor:
        s = (q @ q.mT).masked_fill(padded[:, None, None], float("-inf"))
        return F.softmax(s + torch.zeros(Q, Q).masked_fill(future, -torch.inf), -1) @ q

    hidden = padded[:, None, None] | future
    trace = looked_at(attend, q)
    want = (q @ q.mT).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(trace.weights(), want)
    assert torch.equal(trace.logits() == -torch.inf, hidden.expand(2, 3, Q, Q))


def test_padding_that_wipes_out_rows_and_is_hidden_as_keys() -> None:
    """A padded query's scores are 0, and it mixes what is no padding alike."""
    q, real = normal(2, 3, Q, D), torch.arange(Q) < torch.tensor([3, Q])[:, None]

    def attend(q: Tensor) -> Tensor:
        s = (q @ q.mT) * (real[:, :, None] & real[:, None]).float()[:, None]
        return s.masked_fill(~real[:, None, None], -1e9).softmax(-1) @ q

    trace = looked_at(attend, q)
    want = (q @ q.mT).masked_fill(~real[:, None, :, None], 0.0)
    want = want.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(trace.weights(), want)
    torch.testing.assert_close(trace.out, want @ q)


@pytest.mark.parametrize("low", [-1e5, -1e9, -1e10, torch.finfo(torch.float32).min])
def test_rows_that_an_added_number_hides_whole(low: float) -> None:
    """With padding on the left, the first queries see nothing but padding."""
    q, real = 2 * normal(2, 3, Q, D), torch.arange(Q) >= torch.tensor([0, 3])[:, None]
    seen = real[:, None, None] & torch.ones(Q, Q).tril().bool()
    trace = looked_at(lambda q: (q @ q.mT + ~seen * low).softmax(-1) @ q, q)
    want = (q @ q.mT).masked_fill(~seen, -torch.inf).softmax(-1)
    rows = real[:, None].expand(2, 3, Q)
    torch.testing.assert_close(trace.weights()[rows], want[rows])


@pytest.mark.parametrize("low", [0.0, -1e9])
def test_other_weights_than_those_of_the_scores_are_still_refused(low: float) -> None:
    """Also where some rows are hidden whole."""
    q, hidden = normal(2, 3, Q, D), torch.zeros(Q, 1)
    hidden[0] = low

    def attend(q: Tensor) -> Tensor:
        s = q @ q.mT + hidden
        s.data.mul_(3)
        return s.softmax(-1) @ q

    with pytest.raises(regard.RegardError, match="its weights are not those"):
        looked_at(attend, q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_a_softmax_in_float32(dtype: torch.dtype) -> None:
    q = normal(2, 3, Q, D).to(dtype)

    def attend(q: Tensor) -> Tensor:
        low = torch.finfo(dtype).min
        s = (q @ q.mT).masked_fill(torch.ones(Q, Q).triu(1).bool(), low)
        return s.float().softmax(-1).type_as(q) @ q

    trace = looked_at(attend, q)
    s = (q.float() @ q.float().mT).masked_fill(torch.ones(Q, Q).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(trace.weights(), s.softmax(-1), atol=1e-5, rtol=1e-4)
    assert trace.inputs.q.dtype == dtype


def test_dropout_drops_from_the_output_alone() -> None:
    q = normal(2, 3, Q, D)
    trace = looked_at(lambda q: F.dropout((q @ q.mT).softmax(-1), 0.5) @ q, q)
    assert_weights(trace, q @ q.mT)


def test_learned_queries_attend() -> None:
    latents, x = nn.Parameter(normal(Q, D)), normal(2, K, D, seed=1)
    trace = looked_at(lambda x: (latents @ x.mT).softmax(-1) @ x, x)
    assert_weights(trace, (latents @ x.mT)[:, None].detach())


def test_heads_one_after_the_other() -> None:
    x = normal(3, Q, D)
    model = Attends(lambda x: torch.stack([(h @ h.T).softmax(-1) @ h for h in x]))
    with regard.watch(model, keep="traces") as seen:
        model(x)
    assert seen[""].calls == 3
    for trace, h in zip(seen[""].traces, x, strict=True):
        assert_weights(trace, h @ h.T)


def test_a_loss_on_what_is_seen() -> None:
    q, k, bias = (normal(*s, seed=i) for i, s in enumerate([(2, Q, D), (2, K, D), (Q, K)]))
    for t in (q, k, bias):
        t.requires_grad_()
    trace = looked_at(
        lambda q, k, b: (q @ k.mT * 0.7 + b).softmax(-1) @ k, q, k, bias, gradients=True
    )
    got = torch.autograd.grad(trace.entropy.sum(), [q, k, bias])
    w = (q @ k.mT * 0.7 + bias).softmax(-1)
    want = torch.autograd.grad(-(w * w.log()).sum(), [q, k, bias])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
