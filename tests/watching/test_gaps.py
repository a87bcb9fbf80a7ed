"""Attention that cannot be seen is named at the end, also where other layers were seen; what only
looks like attention is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard import RegardError, masks


def talking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads mixed between the softmax and the values."""
    weights = (q @ k.mT).softmax(-1)
    return torch.einsum("bhij,hg->bgij", weights, torch.eye(2)) @ v


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return talking(q, k, v).transpose(1, 2).flatten(2)


class Pair(nn.Module):
    """A layer that can be seen, and another."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.seen, self.other = nn.MultiheadAttention(16, 2, batch_first=True), other

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.seen(x, x, x, need_weights=False)[0])


HERE = rf"\S*test_gaps\.py:{talking.__code__.co_firstlineno + 3}: .*mixes the weights"
"""The line of the product with values, and why it cannot be followed."""
X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_attention_by_hand_beside_what_is_seen_is_named(grad: bool) -> None:
    m = Pair(ByHand())
    failing = pytest.raises(
        RegardError, match=rf"got:      Pair: other \(by hand, {HERE}[\s\S]*layers="
    )
    with failing, torch.set_grad_enabled(grad), regard.watch(m) as seen:
        m(X)
    assert list(seen) == ["seen"]
    with torch.set_grad_enabled(grad), regard.watch(m, layers="seen") as seen:
        m(X)
    assert list(seen) == ["seen"]


def test_two_watches_both_name_it() -> None:
    m = Pair(ByHand())
    outer = pytest.raises(RegardError, match=rf"other \(by hand, {HERE}")
    inner = pytest.raises(RegardError, match=rf"other \(by hand, {HERE}")
    with outer, regard.watch(m), inner, regard.watch(m):
        m(X)


def test_linear_attention_beside_what_is_seen_is_named() -> None:
    m = Pair(regard.nn.LinearAttention(16, 2))
    with (
        pytest.raises(RegardError, match=r"Pair: other \(linear attention; trace=True "),
        regard.watch(m),
    ):
        m(X)
    with regard.watch(m, layers=["seen"]) as seen:
        m(X)
    assert list(seen) == ["seen"]


def test_all_by_hand_says_where() -> None:
    m = nn.Sequential(ByHand(), nn.Linear(16, 16))
    failing = pytest.raises(
        RegardError,
        match=r"no attention was seen\n.*run 1 times; attention by hand in 0 \(by",
    )
    with failing, regard.watch(m):
        m(X)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities of words, and the mean of their embeddings."""
        return (x @ self.table.T).softmax(-1) @ self.table


class Flattened(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


class Router(nn.Module):
    """Each token's experts, mixed by weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Parameter(torch.randn(16, 3)), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        answers = self.experts(tokens).unflatten(-1, (3, 16))
        shares = (tokens @ F.normalize(self.router, dim=0)).softmax(-1)
        mixed = torch.einsum("te,ted->td", shares, answers)
        also = torch.bmm(shares[:, None], answers)[:, 0]
        return (mixed + also).view_as(x)


class Dispatch(nn.Module):
    """Tokens sent to experts, by shares that others are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Parameter(torch.randn(16, 3)), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares = (tokens @ F.normalize(self.router, dim=0)).softmax(-1)
        sharp = shares * (shares > 0.2)
        sent = torch.einsum("te,td->ed", shares, tokens) + torch.einsum("te,td->ed", sharp, tokens)
        return x + sent.mean(0)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        answers = self.experts(x).unflatten(-1, (3, 16))
        return (self.gate(x).softmax(-1)[..., None, :] @ answers)[..., 0, :]


class Contrast(nn.Module):
    """Texts compared with images: nothing is mixed by it."""

    def forward(self, x: Tensor) -> Tensor:
        likeness = (x @ x.mT).softmax(-1)
        return x * likeness.diagonal(dim1=-2, dim2=-1)[..., None]


class Products(nn.Module):
    """Products without a softmax, and a softmax of something else."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ x.mT) @ x) * x.softmax(-1)


@pytest.mark.parametrize(
    "kind", [Classifier, Flattened, Router, Dispatch, Gate, Contrast, Products]
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_no_attention_raises_nothing(kind: type[nn.Module], inference: bool) -> None:
    m = Pair(kind())
    want = m(X)
    with torch.inference_mode(inference), regard.watch(m) as seen:
        torch.testing.assert_close(m(X), want)
    assert list(seen) == ["seen"]


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_what_regard_computes_is_not_by_hand(backend: str) -> None:
    class Traced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            t = x[:, None]
            return regard.trace(t, t, t, mask=masks.causal(), backend=backend).out[:, 0]

    m = Pair(Traced())
    with regard.watch(m) as seen:
        m(X)
    assert list(seen) == ["seen", "other"]


@pytest.mark.compiled
def test_attention_by_hand_in_a_compiled_model_is_named() -> None:
    m = Pair(ByHand()).eval()
    compiled = torch.compile(m, backend="aot_eager")
    with torch.no_grad():
        want = compiled(X)
        failing = pytest.raises(RegardError, match=r"_orig_mod\.other \(by hand, ")
        with failing, regard.watch(compiled):
            torch.testing.assert_close(compiled(X), want)
        with regard.watch(compiled, layers="*seen") as seen:
            torch.testing.assert_close(compiled(X), want)
        torch.testing.assert_close(compiled(X), want)
    assert list(seen) == ["_orig_mod.seen"]
