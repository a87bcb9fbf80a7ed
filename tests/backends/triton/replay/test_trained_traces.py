"""Traces whose output learns by PyTorch's own node, and whose statistics do when they are asked
for. The passes are the formula's: what is tested is how they are tied to autograd."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import regard
from regard import masks
from regard.backends import cudnn_plans
from regard.backends.contract import LearnedRows, Rows
from regard.backends.passes import Pull
from regard.backends.reference import Reference
from regard.backends.triton import cudnn
from regard.backends.triton.operators import _differentiable, _learning
from regard.backends.triton.replay import training
from regard.backends.triton.replay.passes import RepeatedBackward, RepeatedForward
from regard.backends.triton.replay.steps import Fresh
from regard.backends.triton.replay.training import TrainedTrace
from regard.inputs import AttentionInputs, check

pytestmark = pytest.mark.skipif(
    not (training.AVAILABLE and cudnn_plans.knows_forward() and cudnn_plans.knows_backward()),
    reason="this PyTorch shows no nodes, or has another operator",
)
G = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(1))
ANOTHER = torch.zeros(2, 3, 16, 8)
"""What is found in another way."""
Tensors = Sequence[Tensor]


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 16, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3)]


def given(q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
    return check(
        q, k, v, mask=masks.causal(), score=None, bias=None, softcap=None, sink=None, scale=None,
        dropout=0.0, training=False,
    )  # fmt: skip


def by_formula(tensors: Tensors, pull: Pull) -> list[Tensor]:
    """Gradients of a call of these tensors. (Below autograd, none can be asked for.)"""
    q, k, v = (t.detach() for t in tensors)
    hidden = torch.ones(16, 16).triu(1).bool()
    p = (q @ k.mT * 8**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    g_out = torch.zeros_like(q) if pull.out is None else pull.out
    dp = g_out @ v.mT
    ds = dp - (p * dp).sum(-1, keepdim=True)
    if pull.lse is not None:
        ds = ds + pull.lse[..., None]
    if pull.entropy is not None:
        logs = p.clamp_min(1e-30).log()
        ds = ds - pull.entropy[..., None] * (logs - (p * logs).sum(-1, keepdim=True))
    ds = p * ds * 8**-0.5
    return [ds @ k, ds.mT @ q, p.mT @ g_out]


class Attend(RepeatedForward):
    def __init__(self, rest: tuple[Any, ...]) -> None:
        self.rest, self.replay, self.calls = rest, ([], []), 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, seed: int | None = None) -> Any:
        self.calls += 1
        with torch.no_grad():
            out, *others = Reference().observe(given(q, k, v))
            out = torch.empty_like(q).copy_(out)
            return Rows(out, *(t.contiguous() for t in others)), others[0]


class Pulled(RepeatedBackward):
    def __init__(self) -> None:
        self.pulls: list[Pull] = []

    def __call__(self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull) -> Tensors:
        self.pulls.append(pull)
        return by_formula((x.q, x.k, x.v), pull)

    def mending(self, *_: Any) -> Any:
        return [Fresh.like(torch.empty(2, 3, 16, 8)) for _ in range(3)], []


class Backward(TorchDispatchMode):
    """cuDNN's backward pass, where there is none."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default:
            self.calls += 1
            g, q, k, v, *_ = args
            return tuple(by_formula((q, k, v), Pull(g, None, None)))
        return func(*args, **(kwargs or {}))


def trained(otherwise: Any = None) -> tuple[TrainedTrace, Pulled]:
    attend = Attend(given(*qkv()).beside_tensors())
    pull = Pulled()
    other = otherwise or (lambda q, k, v: q)
    return TrainedTrace(attend, pull, _differentiable, other, _learning), pull


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "generation", lambda device: 9)


def test_the_output_has_a_node_of_pytorch() -> None:
    run, pull = trained()
    q, k, v = qkv()
    rows = run(q, k, v)
    assert isinstance(rows, LearnedRows)
    assert type(rows.out.grad_fn).__name__ == "ScaledDotProductCudnnAttentionBackward0"
    want = Reference().observe(given(q, k, v))
    torch.testing.assert_close(rows.out, want.out)
    for turn in range(3):
        with Backward() as theirs:
            got = torch.autograd.grad(rows.out, (q, k, v), G, retain_graph=True)
        torch.testing.assert_close(got, tuple(by_formula((q, k, v), Pull(G, None, None))))
        # The first time shows whether there is something to mend.
        assert (theirs.calls, len(pull.pulls)) == (1, 1), turn


def test_what_answers_for_the_operator_is_seen_by_its_own_thread_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `with` enters a mode, PyTorch says so to all threads, and may never take it back."""
    seen = []
    attend = cudnn_plans.attend

    def told(*given: Any) -> Any:
        seen.append((is_in_torch_dispatch_mode(), torch._C._len_torch_dispatch_stack()))
        return attend(*given)

    monkeypatch.setattr(cudnn_plans, "attend", told)
    run, _ = trained()
    run(*qkv())
    assert seen == [(False, 1)] * 2
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("asked", [("lse",), ("entropy",), ("lse", "entropy"), ("out", "lse")])
def test_statistics_learn_when_they_are_asked_for(asked: tuple[str, ...]) -> None:
    run, pull = trained()
    q, k, v = qkv()
    rows, plain = run(q, k, v), Reference().observe(given(q, k, v))
    assert isinstance(rows, Rows)
    pulls = dict(zip(("out", "lse", "entropy"), (G, *torch.randn(2, 2, 3, 16)), strict=True))
    for name in asked:
        torch.testing.assert_close(getattr(rows, name), getattr(plain, name))
    with Backward():
        found = [getattr(rows, name) for name in asked]
        got = torch.autograd.grad(found, (q, k, v), [pulls[name] for name in asked])
    want = by_formula((q, k, v), Pull(*(pulls[n] if n in asked else None for n in pulls)))
    torch.testing.assert_close(got, tuple(want))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    exact = Reference().observe(given(*leaves))
    found = [getattr(exact, name) for name in asked]
    theirs = torch.autograd.grad(
        found, leaves, [pulls[name] for name in asked], allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close(got, theirs)
    assert pull.pulls[-1].out is None or "out" in asked


def test_kinds_with_a_loss_of_statistics_are_run_as_one() -> None:
    """Two backward passes take longer than one that finds all gradients."""
    run, _ = trained(lambda q, k, v: ANOTHER)
    q, k, v = qkv()
    rows = run(q, k, v)
    assert isinstance(rows, Rows)
    rows.lse.sum().backward()
    assert run(q, k, v) is ANOTHER


def test_what_only_looks_joins_no_graph() -> None:
    run, pull = trained()
    rows = run(*qkv())
    assert isinstance(rows, LearnedRows)
    assert not any(t.requires_grad for t in rows.map(Tensor.detach))
    assert not any(t.requires_grad for t in rows.at_hand()[1:])
    assert not any(t.requires_grad for t in rows.plain()[1:])
    assert "_learned" not in rows.__dict__
    out, lse, max_logit, entropy = rows
    assert (out.requires_grad, lse.requires_grad, entropy.requires_grad) == (True, True, True)
    assert not max_logit.requires_grad
    assert rows[1] is lse
    assert rows._replace(max_logit=lse).lse is lse
    assert not pull.pulls


@pytest.mark.parametrize("where", ["no_grad", "inference mode", "checkpoint", "torch.func"])
def test_statistics_are_those_of_the_call_wherever_they_are_asked_for(where: str) -> None:
    """As if they had been tied to autograd at once: what is entered later is not about them."""
    run, _ = trained()
    tensors = qkv()
    rows, a = run(*tensors), torch.ones(3, requires_grad=True)
    assert isinstance(rows, Rows)

    def loss(a: Tensor) -> Tensor:
        return (a * rows.lse.sum()).sum()

    match where:
        case "no_grad":
            with torch.no_grad():
                assert rows.lse.requires_grad
        case "inference mode":
            with torch.inference_mode():
                _ = rows.lse
        case "checkpoint":
            found = checkpoint(loss, a, use_reentrant=False)
            assert isinstance(found, Tensor)
            found.backward(retain_graph=True)
            want = by_formula(tensors, Pull(None, torch.full((2, 3, 16), 3.0), None))
            torch.testing.assert_close([t.grad for t in tensors], want)
        case _:
            got = torch.func.grad(loss)(torch.ones(3))
            torch.testing.assert_close(got, rows.lse.detach().sum().expand(3))
    got = torch.autograd.grad(loss(a), tensors, retain_graph=True)
    want = by_formula(tensors, Pull(None, torch.full((2, 3, 16), 3.0), None))
    torch.testing.assert_close(got, tuple(want))


@pytest.mark.parametrize("which", ["q", "the output"])
def test_statistics_of_what_has_changed_learn_nothing(which: str) -> None:
    """As where a tensor that autograd saved was written to. They can be looked at."""
    run, _ = trained()
    q, k, v = (t * 1 for t in qkv())
    rows = run(q, k, v)
    assert isinstance(rows, Rows)
    want = Reference().observe(given(q, k, v)).lse
    (q if which == "q" else rows.out).mul_(2)
    torch.testing.assert_close(rows.lse, want)
    with pytest.raises(regard.RegardError, match="in-place change"):
        rows.lse.sum().backward()


def test_a_call_that_is_shown_and_forgotten_leaves_nothing() -> None:
    run, _ = trained()
    gc.disable()
    try:
        q, k, v = (t * 1 for t in qkv())
        rows = run(q, k, v)
        assert isinstance(rows, Rows)
        loss = rows.out.sum() + rows.lse.sum()
        held = [weakref.ref(t) for t in (q, k, v, rows.out, rows.lse)]
        del q, k, v, rows
        with Backward():
            loss.backward()
        assert [t() for t in held] == [None] * 5
    finally:
        gc.enable()


def test_hooks_on_saved_tensors_are_left_another_way() -> None:
    run, _ = trained(lambda q, k, v: ANOTHER)
    with torch.autograd.graph.save_on_cpu():
        assert run(*qkv()) is ANOTHER
