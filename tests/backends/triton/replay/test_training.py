"""Training inside PyTorch's own autograd: what is mended, refused, and left to another way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import regard
from regard import masks
from regard.backends.called_forms import Differentiable
from regard.backends.contract import Rows
from regard.backends.passes import Pull
from regard.backends.triton.operators import _differentiable
from regard.backends.triton.replay import training
from regard.backends.triton.replay.passes import RepeatedBackward, RepeatedForward
from regard.backends.triton.replay.steps import Fresh
from regard.backends.triton.replay.training import Trained
from regard.inputs import AttentionInputs, check
from regard.transforms import is_batched

pytestmark = pytest.mark.skipif(not training.AVAILABLE, reason="this PyTorch shows no nodes")


class Attend(RepeatedForward):
    """A forward pass by PyTorch's CPU operator, whose node keeps the same as cuDNN's."""

    def __init__(self, rest: tuple[Any, ...]) -> None:
        self.rest, self.replay = rest, ([], [])
        self.calls = 0
        self.lay_out: Callable[[Tensor], Tensor] = lambda q: q

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Rows, Tensor]:
        self.calls += 1
        q = self.lay_out(q)
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(q, k, v, is_causal=True)
        return Rows(out, lse, lse, lse), lse

    def output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self(q, k, v)[0].out


class Pulled(RepeatedBackward):
    """A backward pass that gives these gradients, and launches something that mends."""

    def __init__(self, gradients: tuple[Tensor, ...] | None = None) -> None:
        self.gradients = gradients or tuple(torch.randn(3, 2, 3, 16, 8))
        self.calls = 0

    def __call__(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> tuple[Tensor, ...]:
        self.calls += 1
        return self.gradients

    def mending(self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull) -> Any:
        assert kept.numel() == 0
        assert rows.lse.shape == (2, 3, 16)
        # As PyTorch's operator lays them out.
        return [Fresh.like(torch.empty(2, 16, 3, 8).transpose(1, 2)) for _ in range(3)], [WHICH]


WHICH: Any = object()


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Tensor | None]]:
    """The tensors of each launch that mends."""
    found: list[Sequence[Tensor | None]] = []

    def note(steps: list[Any], tensors: Sequence[Tensor | None]) -> None:
        assert steps == [WHICH]
        found.append(tensors)

    monkeypatch.setattr(training, "launch_again", note)
    return found


def qkv(**learned: bool) -> list[Tensor]:
    """As a model has them: turned, so that their outputs lie otherwise than most gradients."""
    torch.manual_seed(0)
    turned = [torch.randn(2, 16, 3, 8).transpose(1, 2) for _ in range(3)]
    return [t.requires_grad_(learned.get(n, True)) for n, t in zip("qkv", turned, strict=True)]


def trained(
    pull: Pulled, otherwise: Any = None, differentiable: Differentiable = _differentiable
) -> tuple[Trained, Attend, list[Tensor]]:
    q, k, v = qkv()
    rest = check(
        q, k, v, mask=masks.causal(), score=None, bias=None, softcap=None, sink=None, scale=None,
        dropout=0.0, training=False,
    ).beside_tensors()  # fmt: skip
    attend = Attend(rest)
    other = otherwise or (lambda q, k, v: q)
    return Trained(attend, pull, differentiable, other), attend, [q, k, v]


def exact(tensors: list[Tensor], g: Tensor) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    out = regard.attention(*leaves, mask=masks.causal(), backend="reference")
    return list(torch.autograd.grad(out, leaves, g.double()))


def near(got: Iterable[Tensor], want: Iterable[Tensor]) -> bool:
    return all(
        torch.allclose(mine.double(), its, atol=1e-5) for mine, its in zip(got, want, strict=True)
    )


def test_what_the_node_found_is_mended_in_place(mended: list[Sequence[Tensor | None]]) -> None:
    pull = Pulled()
    run, _, tensors = trained(pull)
    g = torch.randn(2, 3, 16, 8)
    # Nothing is known yet of such a backward pass: it is run as a whole.
    assert all(map(torch.equal, torch.autograd.grad(run(*tensors), tensors, g), pull.gradients))
    for i in range(2):
        out = run(*tensors)
        got = torch.autograd.grad(out, tensors, g, retain_graph=True)
        assert near(got, exact(tensors, g))
        q, k, v, saved, _, kept, pulled, *own = mended[-1]
        assert all(
            a is not None and torch.equal(a, b) for a, b in zip((q, k, v), tensors, strict=True)
        )
        assert saved is not None
        assert saved.data_ptr() == out.data_ptr()
        assert kept is None
        assert pulled is not None
        assert pulled.stride() == out.stride()
        assert all(
            a is not None and a.data_ptr() == b.data_ptr() for a, b in zip(own, got, strict=True)
        )
        assert len(mended) == i + 1
    # The graph may be gone through again.
    torch.autograd.grad(out, tensors, g)
    assert (len(mended), pull.calls) == (3, 1)


def test_gradients_that_nobody_wants(mended: list[Sequence[Tensor | None]]) -> None:
    run, _, _ = trained(pull := Pulled())
    q, k, v = qkv(k=False)
    g = torch.ones(2, 3, 16, 8)
    first = torch.autograd.grad(run(q, k, v), (q, v), g)
    assert torch.equal(first[0], pull.gradients[0])
    assert torch.equal(first[1], pull.gradients[2])
    got = torch.autograd.grad(run(q, k, v), (q, v), g)
    assert near(got, exact([q, k, v], g)[::2])
    dk = mended[-1][8]
    assert dk is not None
    assert dk.shape == k.shape


@pytest.mark.parametrize("why", ["deterministic", "laid out by others", "other layouts"])
def test_what_cannot_be_mended_is_found_anew(
    why: str, mended: list[Sequence[Tensor | None]], request: pytest.FixtureRequest
) -> None:
    run, _, tensors = trained(pull := Pulled())
    g = torch.randn(2, 3, 16, 8)
    if why == "other layouts":
        pull.mending = lambda *_: ([None] * 3, [WHICH])  # type: ignore[method-assign]
    torch.autograd.grad(run(*tensors), tensors, g)
    assert pull.calls == 1
    out = run(*tensors)
    if why == "laid out by others":
        out.grad_fn.register_prehook(lambda given: (given[0].contiguous(),))
    if why == "deterministic":
        torch.use_deterministic_algorithms(True)
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.autograd.grad(out, tensors, g)
    assert (pull.calls, mended) == (2, [])


def test_hooks_on_saved_tensors_are_given_a_whole_output() -> None:
    """They are called before it is mended, so another way is gone."""
    run, attend, tensors = trained(Pulled(), lambda q, k, v: q * 2)
    run(*tensors)
    before = attend.calls
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(run(*tensors), tensors[0] * 2)  # type: ignore[arg-type]
    assert attend.calls == before
    assert not torch.equal(run(*tensors), tensors[0] * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "why", ["nothing is replayed", "a node that shows nothing", "an output that lies otherwise"]
)
def test_calls_for_which_it_is_not_the_way(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, attend, tensors = trained(Pulled(), lambda q, k, v: q * 2)
    if why == "nothing is replayed":
        attend.replay = None  # type: ignore[assignment]
    elif why == "a node that shows nothing":
        monkeypatch.setattr("regard.backends.cudnn_plans._SAVED", ("queries",))
    else:
        tensors[0] = tensors[0].detach().contiguous().requires_grad_()
        attend.lay_out = lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        assert torch.equal(run(*tensors), tensors[0] * 2)  # type: ignore[arg-type]
    assert attend.calls <= 2


@pytest.mark.parametrize("why", ["they may be differentiated", "they are many at once"])
def test_whoever_asks_for_more_is_given_other_gradients(why: str) -> None:
    mine = Pulled()
    more: list[Pull] = []

    def differentiable(
        x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> tuple[Tensor, ...]:
        more.append(pull)
        assert pull.out is not None
        return tuple(pull.out * i for i in range(3))

    run, _, tensors = trained(mine, differentiable=differentiable)
    many = why == "they are many at once"
    g = torch.randn(4, 2, 3, 16, 8) if many else torch.randn(2, 3, 16, 8)
    how = {"is_grads_batched": many, "create_graph": not many}
    got = torch.autograd.grad(run(*tensors), tensors, g, **how)  # type: ignore[arg-type]
    assert all(torch.equal(t, g * i) for i, t in enumerate(got))
    assert not mine.calls
    (pull,) = more
    assert is_batched(pull.out) == many


def test_gradients_that_stand_for_the_negative(mended: list[Sequence[Tensor | None]]) -> None:
    run, _, tensors = trained(Pulled())
    g = torch._neg_view(torch.randn(2, 16, 3, 8)).transpose(1, 2)
    for _ in range(2):
        got = torch.autograd.grad(run(*tensors), tensors, g)
    assert near(got, exact(tensors, g))
    pulled = mended[-1][6]
    assert pulled is not None
    assert not pulled.is_neg()


def test_nodes_that_nobody_shows_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under compiled autograd: what a masked NaN may have spoilt would stay so."""
    run, _, tensors = trained(Pulled())
    out = run(*tensors)
    monkeypatch.setattr(training, "_CURRENT", lambda: None)
    with pytest.raises(regard.RegardError, match="compiled autograd"):
        torch.autograd.grad(out, tensors, torch.randn(2, 3, 16, 8))


def test_nothing_is_held_but_by_autograd() -> None:
    run, _, tensors = trained(Pulled())
    gc.disable()
    try:
        q, k, v = (t * 1 for t in tensors)
        out = run(q, k, v)
        held = [weakref.ref(t) for t in (q, k, v, out)]
        del q, k, v
        loss = out.sum()  # type: ignore[union-attr]
        loss.backward()
        del out
        # The graph is still there, but what it saved is not.
        assert loss.grad_fn is not None
        assert [t() for t in held] == [None] * 4
    finally:
        gc.enable()
