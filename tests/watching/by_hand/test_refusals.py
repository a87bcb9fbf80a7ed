"""What cannot be said by a trace is named with its line; following never changes or ends a run."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import regard
from regard import RegardError
from regard.errors import RegardWarning
from regard.watching.by_hand.calls import Call
from regard.watching.changed_outputs import Intervening
from tests.watching.by_hand.test_forms import ByHand, H, N, Pair, inputs, minimal

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
TURN = torch.linalg.qr(torch.randn(H, H, generator=torch.Generator().manual_seed(0)))[0]


def talking_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhij,hg->bgij", q @ k.mT, TURN)
    return s.softmax(-1) @ v  # here


def talking_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = F.linear((q @ k.mT).softmax(-1).permute(0, 2, 3, 1), TURN).permute(0, 3, 1, 2)
    return w @ v  # here


def another_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries compete for keys: slot attention."""
    w = (q @ k[:, :, :5].mT).softmax(-2)
    return w @ v[:, :, :5]  # here


def compete(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-2)
    w = w / w.sum(-1, keepdim=True)
    return w @ v  # here


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(1) @ v  # here


def changed_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1) * torch.rand(N, N)
    return torch.matmul(w, v)  # here


def hidden_too_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Other weights go than those of scores that were masked: rows no longer sum to 1."""
    w = (q @ k.mT).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf).softmax(-1)
    return w.masked_fill(torch.ones(N, N).triu().bool(), 0.0) @ v  # here


def changed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.relu(q @ k.mT).softmax(-1) @ v  # here


def a_view_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s[..., 0].zero_()
    return s.softmax(-1) @ v  # here


def keys_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.clone()
    w = (q @ k.mT).softmax(-1)
    k.zero_()
    return w @ v  # here


def a_sequence_at_a_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return torch.stack([w[i] @ v[i] for i in range(len(w))])  # here


def rows_of_sequences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    return torch.stack([a @ b for a, b in zip(w, v, strict=True)])  # here


def some_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (q @ k.mT).softmax(-1)
    front, back = w.split((3, N - 3), -1)
    return front @ v[:, :, :3] + back @ v[:, :, 3:]  # here


def strongest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w, at = (q @ k.mT).softmax(-1).topk(2, -1)
    chosen = (
        v[:, :, None]
        .expand(-1, -1, N, -1, -1)
        .gather(3, at[..., None].expand(*at.shape, v.shape[-1]))
    )
    return (w[..., None, :] @ chosen).squeeze(-2)  # here


def some_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT)[..., :5]
    return s.softmax(-1) @ v[:, :, :5]  # here


def logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(q @ k.mT, -1).exp() @ v  # here


def divided_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT).exp()
    mixed = e @ v  # here
    return mixed / e.sum(-1, keepdim=True)


def wiped_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A score of 0 is still seen."""
    keep = torch.ones(N, N)
    keep[2, 1] = 0
    return ((q @ k.mT) * keep).softmax(-1) @ v  # here


def hidden_beside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is added hides another pair than that whose score is 0."""
    keep = torch.ones(N, N)
    keep[2, 1] = 0
    return ((q @ k.mT) * keep - 1e9 * (1 - keep.T)).softmax(-1) @ v  # here


WHY = {
    wiped_out: "multiplied by 0 where nothing hides them",
    hidden_beside: "multiplied by 0 where nothing hides them",
    a_sequence_at_a_time: "getitem takes some of the weights",
    rows_of_sequences: "unbind takes some of the weights",
    some_keys: "split takes some of the weights",
    strongest: "topk takes some of the weights",
    some_scores: "getitem takes some of the scores",
    logarithms: "exponential of a log_softmax",
    divided_late: "before they are divided by their sum",
    talking_before: "mixes the scores before the softmax",
    talking_after: "linear changes the weights between",
    another_axis: "over another axis than the softmax",
    compete: "div changes the weights between",
    hidden_too_late: "masked_fill changes the weights between",
    over_heads: "the softmax is not over keys",
    changed_weights: "mul changes the weights between",
    changed_scores: "relu changes the scores before",
    a_view_written_to: "written to where it could not be followed",
    keys_written_to: "changed in place",
}


def line_of(form: Form) -> int:
    lines, first = inspect.getsourcelines(form)
    return first + next(i for i, text in enumerate(lines) if "# here" in text)


@torch.no_grad()
@pytest.mark.parametrize("form", WHY)
def test_the_line_is_named(form: Form) -> None:
    m, x = Pair(ByHand(form)), inputs()
    torch.manual_seed(0)
    want = m(x)
    torch.manual_seed(0)
    said = rf"other \(by hand, \S*test_refusals\.py:{line_of(form)}: .*{WHY[form]}"
    with pytest.raises(RegardError, match=said), regard.watch(m) as seen:
        got = m(x)
    assert torch.equal(got, want)
    assert list(seen) == ["seen"]


def looked_at(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Some weights are used before all of them are."""
    w = (q @ k.mT).softmax(-1)
    first = w[:, :, :1] @ v
    return w @ v + 0 * first


def parts_of_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A part of a product becomes queries."""
    mixed = torch.cat([q, q], -2) @ (k.mT @ v)
    return minimal(mixed[..., :N, :], k, v)


@torch.no_grad()
@pytest.mark.parametrize("form", [looked_at, parts_of_products])
def test_what_else_parts_are_is_no_gap(form: Form) -> None:
    m = Pair(ByHand(form))
    with regard.watch(m) as seen:
        m(inputs())
    assert list(seen) == ["seen", "other"]


@torch.no_grad()
def test_a_factor_that_begins_to_wipe_out_is_named() -> None:
    """Weights are compared when a module is seen first; what hides them is checked each time."""

    class Kept(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
            return ((q @ k.mT) * keep).softmax(-1) @ v

    q, k, v = torch.randn(3, 2, H, N, 4)
    keep = torch.ones(2, 1, N, N)
    watching = regard.watch(model := Kept(), keep="traces")
    seen = watching.attach()
    model(q, k, v, keep)
    assert len(seen[""].traces) == 1
    model(q, k, v, keep.tril())
    with pytest.warns(RegardWarning, match="by 0 where nothing hides them"):
        watching.detach()
    assert len(seen[""].traces) == 1


def test_detach_warns_once() -> None:
    m = Pair(ByHand(talking_after))
    watching = regard.watch(m)
    watching.attach()
    m(inputs())
    m(inputs())
    with pytest.warns(RegardWarning, match=r"other \(by hand, .*linear") as warned:
        watching.detach()
    watching.detach()
    assert len(warned) == 1


def test_an_error_in_following_is_named_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    m, x = Pair(ByHand(minimal)), inputs()
    want = m(x)

    def broken(self: Any) -> None:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(Call, "trace", broken)
    with pytest.raises(RegardError, match=r"other.*TypeError: a mistake of ours"), regard.watch(m):
        got = m(x)
    assert torch.equal(got, want)


def test_nothing_is_kept_alive() -> None:
    held: list[weakref.ref[Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Weights that are kept, beside those of a call that stops half way.
        s = q @ k.mT
        s.softmax(-1)
        held.extend(map(weakref.ref, (q, s)))
        return minimal(q, k, v)

    m = ByHand(attend)
    with torch.no_grad(), regard.watch(m) as seen:
        m(inputs())
    gc.collect()
    assert seen[""].calls == 1
    assert [ref() for ref in held] == [None, None]


def test_two_watches_see_it_once_each() -> None:
    m = Pair(ByHand(minimal))
    with regard.watch(m) as outer, regard.watch(m.other) as inner, regard.watch(m) as other:
        m(inputs())
    assert [{p: at.calls for p, at in seen.items()} for seen in (outer, inner, other)] == [
        {"seen": 1, "other": 1}, {"": 1}, {"seen": 1, "other": 1},
    ]  # fmt: skip


def test_only_layers_that_are_named() -> None:
    m = nn.Sequential(ByHand(minimal), ByHand(minimal))
    with regard.watch(m, layers="1") as seen:
        m(inputs())
    assert list(seen) == ["1"]
    with (
        pytest.raises(RegardError, match=r"no layer.*\n.*\n.*'0', '1'"),
        regard.watch(m, layers="2"),
    ):
        m(inputs())


def test_weights_and_values_meet_in_another_module() -> None:
    class Mix(nn.Module):
        def forward(self, weights: Tensor, v: Tensor) -> Tensor:
            return weights @ v

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mix()

        def forward(self, x: Tensor) -> Tensor:
            return self.mix((x @ x.mT).softmax(-1), x)

    m = Pair(Outer())
    with regard.watch(m) as seen:
        m(inputs())
    assert list(seen) == ["seen", "other"]


def test_relative_values_beside_the_others() -> None:
    table = torch.randn(N, N, 4)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = (q @ k.mT).softmax(-1)
        return torch.einsum("bhij,ijd->bhid", w, table) + w @ v

    m = ByHand(attend)
    with regard.watch(m) as seen:
        m(inputs())
    assert seen[""].calls == 1


def test_what_runs_again_counts_once() -> None:
    m = ByHand(minimal)
    with regard.watch(m) as seen:
        out = checkpoint(m, inputs().requires_grad_(), use_reentrant=False)
        out.sum().backward()
    assert seen[""].calls == 1


class Fused(ByHand):
    """The same through PyTorch's function."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_outputs_are_changed_as_elsewhere() -> None:
    by_hand, fused, x = ByHand(minimal), Fused(), inputs()
    fused.load_state_dict(by_hand.state_dict())

    def without(path: str, nth: int, trace: regard.Trace) -> Tensor:
        return trace.out * torch.tensor([1.0, 0, 1]).view(1, H, 1, 1)

    found = []
    for m in (by_hand, fused):
        with Intervening(m, without):
            out = m(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*m.parameters()])])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[0][0], by_hand(x), atol=1e-3)
