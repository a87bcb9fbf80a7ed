"""torch.compile without graph breaks, torch.export, and the operators behind them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import regard
from regard import Trace, biases, masks, scores
from regard.inputs import check
from regard.values import encode

pytestmark = [
    pytest.mark.compiled,
    # The compiler deprecates parts of itself while it works.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(B: int = 2, H: int = 4, G: int = 2, Q: int = 9, K: int = 9) -> list[Tensor]:
    return [numbers(B, H, Q, 8), numbers(B, G, K, 8, seed=1), numbers(B, G, K, 8, seed=2)]


Call = Callable[..., Any]


def attend(**options: Any) -> Call:
    return lambda q, k, v: regard.attention(q, k, v, **options)


def look(**options: Any) -> Call:
    def ask(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        t = regard.trace(q, k, v, **options)
        return t.out, t.lse, t.entropy, t.max_logit

    return ask


MAKE: dict[str, Callable[..., Call]] = {"attention": attend, "trace": look}

CASES: dict[str, tuple[dict[str, int], Callable[[], dict[str, Any]]]] = {
    "plain": ({}, lambda: {}),
    "causal": ({}, lambda: {"mask": masks.causal()}),
    "decoding": ({"Q": 1}, lambda: {"mask": masks.causal()}),
    "causal-padding": ({}, lambda: {"mask": masks.causal() & masks.padding(torch.tensor([4, 9]))}),
    "documents": (
        {}, lambda: {"mask": masks.causal() & masks.documents(torch.arange(18).view(2, 9) // 4)},
    ),
    "sink-softcap": ({}, lambda: {"sink": numbers(4), "softcap": 2.0}),
}  # fmt: skip


def whole(call: Call, **options: Any) -> Call:
    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


FULL = [(kind, case) for kind in ("attention", "trace") for case in CASES]


@pytest.mark.parametrize(("kind", "case"), FULL)
def test_full_graphs(kind: str, case: str) -> None:
    sizes, options = CASES[case]
    call = MAKE[kind](**options())
    plain = [t.requires_grad_() for t in qkv(**sizes)]
    compiled = [t.requires_grad_() for t in qkv(**sizes)]
    wanted, got = call(*plain), whole(call)(*compiled)
    assert_close(got, wanted)
    first = wanted[0] if isinstance(wanted, tuple) else wanted
    again = got[0] if isinstance(got, tuple) else got
    first.square().sum().backward()
    again.square().sum().backward()
    for one, other in zip(compiled, plain, strict=True):
        assert_close(one.grad, other.grad)


def test_gradients_of_everything_learned() -> None:
    def learned() -> list[Tensor]:
        shapes = [(2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), (4, 8, 8), (4, 5), (4,)]
        return [numbers(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]

    def loss(q: Tensor, k: Tensor, v: Tensor, W: Tensor, table: Tensor, sink: Tensor) -> Tensor:
        t = regard.trace(
            q, k, v, mask=masks.window(4, 1), bias=biases.relative(table), score=scores.general(W),
            softcap=2.0, sink=sink,
        )  # fmt: skip
        return t.out.square().sum() + t.lse.sum() + (t.entropy**2).sum()

    plain, compiled = learned(), learned()
    loss(*plain).backward()
    whole(loss)(*compiled).backward()
    for one, other in zip(compiled, plain, strict=True):
        assert other.grad is not None
        assert other.grad.any()
        assert_close(one.grad, other.grad)


@pytest.mark.parametrize("training", [True, False])
def test_dropout(training: bool) -> None:
    call = attend(dropout=0.4, training=training)
    compiled = whole(call)
    calm = regard.attention(*qkv())
    torch.manual_seed(3)
    one = compiled(*qkv())
    torch.manual_seed(3)
    assert_close(compiled(*qkv()), one)
    torch.manual_seed(3)
    assert_close(call(*qkv()), one)
    assert torch.allclose(one, calm, atol=1e-5) != training
    torch.manual_seed(4)
    assert torch.allclose(compiled(*qkv()), one) != training


def test_a_whole_trace_comes_out_of_a_graph() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Trace:
        return regard.trace(q, k, v, mask=masks.causal())

    got, wanted = whole(call)(*qkv()), call(*qkv())
    assert isinstance(got, Trace)
    assert repr(got) == repr(wanted)
    assert_close(got.weights(), wanted.weights())
    assert_close(got.received(), wanted.received())
    assert_close(got[0, [1]].map(3), wanted[0, [1]].map(3))


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        ("attention", None),
        ("trace", None),
        ("attention", masks.causal()),
        ("trace", masks.causal()),
        ("attention", masks.causal() & masks.window(3)),
    ],
    ids=str,
)
def test_lengths_and_batches_are_symbols(kind: str, mask: masks.Mask | None) -> None:
    call = MAKE[kind](mask=mask)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    # No two sizes alike at first: equal ones would be taken for one.
    for B, n in ((3, 9), (5, 17), (6, 30), (3, 65), (7, 12)):
        tensors = qkv(B=B, Q=n, K=n)
        assert_close(compiled(*tensors), call(*tensors))
    assert 1 <= counter.frame_count <= 2


def test_decoding_with_a_growing_cache_compiles_once_or_twice() -> None:
    call = attend(mask=masks.causal())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for n in (7, 8, 9, 20, 33):
        tensors = qkv(Q=1, K=n)
        assert_close(compiled(*tensors), call(*tensors))
    assert 1 <= counter.frame_count <= 2


def test_inductor() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = regard.trace(2 * q, k, v, mask=masks.causal(), softcap=3.0)
        return torch.relu(t.out) + t.entropy[..., None]

    plain = [t.requires_grad_() for t in qkv()]
    compiled = [t.requires_grad_() for t in qkv()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(call, fullgraph=True)(*compiled)
        got.sum().backward()
    wanted = call(*plain)
    wanted.sum().backward()
    assert_close(got, wanted)
    for one, other in zip(compiled, plain, strict=True):
        assert_close(one.grad, other.grad)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def parts(self, x: Tensor) -> list[Tensor]:
        split = self.project(x).chunk(3, dim=-1)
        return [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in split]

    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(*self.parts(x), mask=masks.causal())


class Traces(Attends):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        t = regard.trace(*self.parts(x), mask=masks.causal() & masks.window(3), softcap=5.0)
        return t.out, t.lse


@pytest.mark.parametrize(
    ("kind", "dynamic"), [(Attends, False), (Attends, True), (Traces, False), (Traces, True)]
)
def test_export(kind: type[nn.Module], dynamic: bool) -> None:
    torch.manual_seed(0)
    module = kind()
    x = numbers(3, 9, 8)
    shapes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}}
    program = torch.export.export(module, (x,), dynamic_shapes=shapes if dynamic else None)
    exported = program.module()
    assert_close(exported(x), module(x))
    if dynamic:
        for longer in (numbers(2, 30, 8), numbers(5, 4, 8)):
            assert_close(exported(longer), module(longer))


OPERATOR_CALLS: dict[str, tuple[bool, Callable[[], dict[str, Any]]]] = {
    "plain": (True, lambda: {}),
    "without-statistics": (False, lambda: {"mask": masks.causal()}),
    "everything": (
        True,
        lambda: {
            "mask": masks.causal() & masks.padding(torch.tensor([4, 9])),
            "bias": biases.relative(numbers(4, 5).requires_grad_()),
            "softcap": 2.0,
            "sink": numbers(4).requires_grad_(),
            "dropout": 0.2,
            "training": True,
        },
    ),
}


@pytest.mark.parametrize("call", OPERATOR_CALLS)
def test_the_operator_keeps_its_promises(call: str) -> None:
    statistics, make = OPERATOR_CALLS[call]
    defaults = {
        "mask": None, "score": None, "bias": None, "softcap": None, "sink": None, "scale": None,
        "dropout": 0.0, "training": False,
    }  # fmt: skip
    tensors = [t.requires_grad_() for t in qkv()]
    x = check(*tensors, **(defaults | make()))
    text, integers, floats, own = encode([x.comparison, x.mask, x.bias])
    args = (
        x.q, x.k, x.v, x.sink, x.seed, own, text, integers, floats, x.softcap, x.dropout,
        statistics, x.bias is not None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.regard.tiled.default, args)
