"""Attention as people write it out: seen with the weights that n×n gives, and never changed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard

B, H, N, D = 2, 3, 7, 4
E = H * D
HIDDEN = torch.ones(N, N).triu(1).bool()
PADDED = torch.arange(N) >= torch.tensor([5, N])[:, None]
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def tutorial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The annotated transformer."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(HIDDEN.logical_not() == 0, -1e9)
    return torch.matmul(F.dropout(scores.softmax(dim=-1), p=0.0), v)


def minimal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """nanoGPT."""
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    keep = torch.tril(torch.ones(N, N)).view(1, 1, N, N)
    att = att.masked_fill(keep[:, :, :N, :N] == 0, float("-inf"))
    return F.dropout(F.softmax(att, dim=-1), 0.0) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tokens before heads; a dense mask of float32's lowest number."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    low = torch.zeros(N, N).masked_fill(HIDDEN, torch.finfo(torch.float32).min)
    attention = torch.softmax(energy / D**0.5 + low, dim=3)
    return torch.einsum("nhql,nlhd->nqhd", [attention, v]).transpose(1, 2)


def ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("... i d, ... j d -> ... i j", q * D**-0.5, k)
    s = torch.where(HIDDEN, -torch.inf, s)
    return torch.einsum("...ij,...jd->...id", s.softmax(-1, dtype=torch.float32), v)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads in the batch, a bias in the product, unfolded for the softmax."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    bias = torch.zeros(N, N).masked_fill(HIDDEN, -torch.inf).expand(B * H, N, N)
    s = torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=D**-0.5)
    w = F.softmax(s.view(B, H, N, N), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(w.view(B * H, N, N), v).view(B, H, N, D)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.mT).mul_(D**-0.5)
    s.masked_fill_(HIDDEN, -torch.inf)
    return s.softmax(-1).matmul(v)


def written_over(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.permute(0, 1, 3, 2)
    s /= D**0.5
    s[HIDDEN.expand_as(s)] = float("-inf")
    return nn.Softmax(-1)(s) @ v


def zeros_and_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first GPT."""
    b = (~HIDDEN).float().view(1, 1, N, N)
    w = torch.matmul(q, k.mT) / math.sqrt(D)
    return torch.matmul(F.softmax(w * b + -1e9 * (1 - b), dim=-1), v)


def keys_in_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (k @ q.mT / D**0.5).masked_fill(HIDDEN.T, -torch.inf)
    return (v.mT @ s.softmax(-2)).mT


def tensors_as_factors(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A scale for each head, and -1 times what is subtracted."""
    s = q @ k.mT * torch.full((H, 1, 1), D**-0.5)
    return (s - torch.zeros(N, N).masked_fill(HIDDEN, torch.inf)).softmax(-1) @ v


def moved_about(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhid,bhjd->ijbh", q, k).div(torch.tensor(D).sqrt())
    s = s.movedim((0, 1), (-2, -1)).masked_fill(HIDDEN, -1e30)
    w = s.softmax(-1).masked_fill(HIDDEN, 0.0)[:, :, None].squeeze(2).contiguous()
    return torch.einsum("bhqk,bhke->bhqe", w, v)


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp over its sum."""
    s = (q @ k.mT / D**0.5).masked_fill(HIDDEN, -torch.inf)
    e = torch.exp(s - s.max(dim=-1, keepdim=True).values)
    return (e / e.sum(dim=-1, keepdim=True)) @ v


def masked_anew(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As CPM-Ant does: the mask is worked out a second time."""
    keep = HIDDEN.logical_not()
    s = (q @ k.mT / D**0.5).masked_fill(keep == torch.tensor(False), torch.tensor(-torch.inf))
    return s.softmax(-1).masked_fill(keep == torch.tensor(False), torch.tensor(0.0)) @ v


FORMS = [
    tutorial, minimal, einsums, ellipsis, folded, in_place, written_over, zeros_and_ones,
    keys_in_rows, tensors_as_factors, moved_about, one_by_one, masked_anew,
]  # fmt: skip


class ByHand(nn.Module):
    """Fused projections, heads, and what the test says."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.qkv, self.form = nn.Linear(E, 3 * E), form

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (t.view(*x.shape[:-1], H, D).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return self.form(*self.heads(x)).transpose(-3, -2).flatten(-2)


class Pair(nn.Module):
    """A layer of PyTorch's beside another."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.seen, self.other = nn.MultiheadAttention(E, H, batch_first=True), other

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x + self.seen(x, x, x)[0])


def inputs() -> Tensor:
    return torch.randn(B, N, E, generator=torch.Generator().manual_seed(0))


def softmax_of(q: Tensor, k: Tensor, added: Tensor, scale: float = D**-0.5) -> Tensor:
    """n×n weights in float64."""
    return (q.double() @ k.double().mT * scale + added).softmax(-1)


CAUSAL = torch.zeros(N, N).masked_fill(HIDDEN, -torch.inf)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", ["traces", "statistics"])
def test_it_is_seen_and_stays_what_it_is(form: Form, keep: str) -> None:
    torch.manual_seed(0)
    m, x = Pair(ByHand(form)), inputs()
    want = m(x)
    m.zero_grad()
    want.square().sum().backward()
    grads = [p.grad for p in m.parameters()]
    m.zero_grad()
    with regard.watch(m, keep=keep) as seen:  # type: ignore[arg-type]
        got = m(x)
    got.square().sum().backward()
    assert torch.equal(got, want)
    assert all(torch.equal(a, b.grad) for a, b in zip(grads, m.parameters(), strict=True))
    assert list(seen) == ["seen", "other"]
    assert (seen["other"].calls, seen["other"].heads) == (1, H)
    if keep == "traces":
        with torch.no_grad():
            q, k, v = m.other.heads(x + m.seen(x, x, x)[0])
            weights = softmax_of(q, k, CAUSAL)
        trace = seen["other"].trace
        torch.testing.assert_close(trace.weights().double(), weights, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(trace.out.double(), weights @ v.double(), atol=1e-5, rtol=1e-5)
        assert trace.received().shape == (B, H, N)
        assert not trace.inputs.q.requires_grad


class Folded(nn.Module):
    """Heads in the batch, from the projections to the output."""

    def __init__(self, tokens_first: bool) -> None:
        super().__init__()
        self.tokens_first, self.qkv = tokens_first, nn.Linear(E, 3 * E)

    def fold(self, t: Tensor) -> Tensor:
        if self.tokens_first:
            return t.transpose(0, 1).contiguous().view(N, B * H, D).transpose(0, 1)
        return t.reshape(B, N, H, D).permute(0, 2, 1, 3).reshape(B * H, N, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.fold, self.qkv(x).chunk(3, -1))
        nothing = torch.empty(B * H, N, N)
        s = torch.baddbmm(nothing, q, k.transpose(-1, -2), beta=0, alpha=D**-0.5)
        return torch.bmm(s.softmax(-1), v).view(B, H, N, D).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("tokens_first", [True, False])
def test_heads_in_the_batch_are_heads(tokens_first: bool) -> None:
    m, x = Folded(tokens_first), inputs()
    with torch.no_grad(), regard.watch(m, keep="traces") as seen:
        m(x)
        q, k, _ = ByHand.heads(m, x)  # type: ignore[arg-type]
    weights = softmax_of(q, k, torch.zeros(()))
    torch.testing.assert_close(seen[""].trace.weights().double(), weights, atol=1e-6, rtol=1e-5)
