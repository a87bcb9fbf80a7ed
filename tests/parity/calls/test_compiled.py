"""torch.compile without graph breaks, torch.export, and the operators behind them.

Most calls leave the choice of a backend open, as users do; Triton's kernels are asked for by name.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import regard
import regard.backends.triton.refusals
from regard import Trace, biases, masks, scores
from regard.inputs import check
from regard.values import encode
from tests.parity import cases
from tests.parity.cases import DEFAULTS

TRITON = pytest.param("triton", marks=pytest.mark.interpreted)
either = pytest.mark.parametrize("backend", [None, TRITON])
pytestmark = [
    pytest.mark.compiled,
    # The compiler deprecates parts of itself while it works.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=source).to(cases.DEVICE)


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

# Without a mask, causal and in a window: calls/test_compiled_grid.py.
CASES: dict[str, tuple[dict[str, int], Callable[[], dict[str, Any]]]] = {
    "decoding": ({"Q": 1}, lambda: {"mask": masks.causal()}),
    "causal-padding": ({}, lambda: {"mask": masks.causal() & masks.padding(torch.tensor([4, 9]))}),
    "documents": (
        {}, lambda: {"mask": masks.causal() & masks.documents(torch.arange(18).view(2, 9) // 4)},
    ),
    "sink-softcap": ({}, lambda: {"sink": numbers(4), "softcap": 2.0}),
}  # fmt: skip


def whole(call: Call, **options: Any) -> Call:
    return torch.compile(call, fullgraph=True, backend="aot_eager", **options)


FULL = [(kind, case, None) for kind in ("attention", "trace") for case in CASES]
FULL += [
    pytest.param(kind, case, "triton", marks=pytest.mark.interpreted)
    for kind, case in (("attention", "decoding"), ("trace", "causal-padding"))
]


@pytest.mark.parametrize(("kind", "case", "backend"), FULL)
def test_full_graphs(kind: str, case: str, backend: str | None) -> None:
    sizes, options = CASES[case]
    call = MAKE[kind](**options(), backend=backend)
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


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
def test_full_graphs_of_common_calls(kind: str, mask: masks.Mask | None) -> None:
    """In sizes for which cards have kernels of their own."""
    call = MAKE[kind](mask=mask)
    three = [numbers(1, 2, 160, 128, seed=i).bfloat16() for i in range(3)]
    wanted, got = call(*three), whole(call)(*three)
    # Compiled, another backend may run, which rounds otherwise.
    largest = max(float(t.abs().max()) for t in (wanted if isinstance(wanted, tuple) else [wanted]))
    assert_close(got, wanted, rtol=0.016, atol=largest * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("kind", MAKE)
def test_full_graphs_with_global_tokens(kind: str) -> None:
    """Made inside and outside of the graph, of tokens that are there and of one to come."""
    outside = masks.causal() | masks.global_tokens([0, 40])

    def inside(*three: Tensor) -> Any:
        return MAKE[kind](mask=masks.window(2, 2) | masks.global_tokens([3]))(*three)

    for call in (MAKE[kind](mask=outside), inside):
        assert_close(whole(call)(*qkv()), call(*qkv()))


CARD: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": lambda **new: {},
    "causal": lambda **new: {"mask": masks.causal()},
    "window": lambda **new: {"mask": masks.causal() & masks.window(3)},
    "padding": lambda **new: {"mask": masks.padding(torch.full((2,), 7, **new))},
    "documents": lambda **new: {"mask": masks.documents(torch.zeros(2, 9, dtype=int, **new))},
    "sink-softcap": lambda **new: {"sink": torch.ones(4, **new), "softcap": 2.0},
    "relative": lambda **new: {"bias": biases.relative(torch.ones(4, 5, **new))},
    "dropout": lambda **new: {"dropout": 0.1, "training": True},
}


LEARNED = ["learned"] if torch.cuda.is_available() else []
"""What is learned on a card that is not there ends the process (torch 2.13)."""


@pytest.mark.skipif(find_spec("triton") is None, reason="its kernels are the ones to choose")
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("case", [*CARD, *LEARNED])
def test_full_graphs_for_a_card_that_need_not_be_there(kind: str, case: str) -> None:
    """Whatever is asked on the way to the kernels, the compiler must know how to ask: shapes and
    devices are enough for that."""
    found: list[Any] = []

    def keep(graph: torch.fx.GraphModule, tensors: list[Tensor]) -> Call:
        found.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    with FakeTensorMode():
        three = [torch.empty(2, h, 9, 64, device="cuda").bfloat16() for h in (4, 2, 2)]
        if case == "learned":
            three[1].requires_grad_()
        call = MAKE[kind](**CARD.get(case, CARD["causal"])(device="cuda"))
        torch.compile(call, fullgraph=True, backend=keep)(*three)
    # What is read on the host must stay outside of the CUDA graphs that the compiler records.
    reads = case == "documents"
    operator = torch.ops.regard.triton_reads if reads else torch.ops.regard.triton
    if case in ("plain", "causal", "window"):
        operator = torch.ops.regard.triton_inference
    assert operator.default in found
    assert (torch.Tag.cudagraph_unsafe in operator.default.tags) == reads


def test_the_compiler_is_not_asked_to_look_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 does not trace `find_spec`."""

    def refuse(name: str) -> None:
        raise AssertionError(f"looked for {name}")

    monkeypatch.setattr(regard.backends.triton.refusals, "find_spec", refuse)
    monkeypatch.setattr(importlib.util, "find_spec", refuse)
    assert regard.backends.triton.refusals.why_not(check(*qkv(), **DEFAULTS)) is not None
    regard.plan(*qkv())


@either
def test_gradients_of_everything_learned(backend: str | None) -> None:
    def learned() -> list[Tensor]:
        shapes = [(2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), (4, 8, 8), (4, 5), (4,)]
        return [numbers(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]

    def loss(q: Tensor, k: Tensor, v: Tensor, W: Tensor, table: Tensor, sink: Tensor) -> Tensor:
        t = regard.trace(
            q, k, v, mask=masks.window(4, 1), bias=biases.relative(table), score=scores.general(W),
            softcap=2.0, sink=sink, backend=backend,
        )  # fmt: skip
        return t.out.square().sum() + t.lse.sum() + (t.entropy**2).sum()

    plain, compiled = learned(), learned()
    loss(*plain).backward()
    whole(loss)(*compiled).backward()
    for one, other in zip(compiled, plain, strict=True):
        assert other.grad is not None
        assert other.grad.any()
        assert_close(one.grad, other.grad)


@either
@pytest.mark.parametrize("training", [True, False])
def test_dropout(training: bool, backend: str | None) -> None:
    call = attend(dropout=0.4, training=training, backend=backend)
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


@pytest.mark.parametrize("kind", ["attention", "trace"])
def test_a_scale_that_changes(kind: str) -> None:
    """The compiler has a symbol for a number that was another before."""
    three = qkv()

    def call(scale: float) -> Any:
        return MAKE[kind](mask=masks.causal(), scale=scale)(*three)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 0.35, 1.0):
        assert_close(compiled(scale), call(scale))


@either
def test_a_whole_trace_comes_out_of_a_graph(backend: str | None) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Trace:
        return regard.trace(q, k, v, mask=masks.causal(), backend=backend)

    got, wanted = whole(call)(*qkv()), call(*qkv())
    assert isinstance(got, Trace)
    assert repr(got) == repr(wanted)
    assert_close(got.weights(), wanted.weights())
    assert_close(got.received(), wanted.received())
    assert_close(got[0, [1]].map(3), wanted[0, [1]].map(3))


@pytest.mark.parametrize(
    ("kind", "mask", "backend"),
    [
        # Other masks: calls/test_compiled_grid.py.
        ("attention", masks.causal(), None),
        ("trace", masks.causal(), None),
        pytest.param("attention", None, "triton", marks=pytest.mark.interpreted),
        pytest.param("trace", masks.causal(), "triton", marks=pytest.mark.interpreted),
    ],
    ids=str,
)
def test_lengths_and_batches_are_symbols(
    kind: str, mask: masks.Mask | None, backend: str | None
) -> None:
    call = MAKE[kind](mask=mask, backend=backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    # No two sizes alike at first: equal ones would be taken for one.
    for B, n in ((3, 9), (5, 17), (6, 30), (3, 65), (7, 12)):
        tensors = qkv(B=B, H=2, G=1, Q=n, K=n)
        assert_close(compiled(*tensors), call(*tensors))
    assert 1 <= counter.frame_count <= 2


@either
def test_decoding_with_a_growing_cache_compiles_once_or_twice(backend: str | None) -> None:
    call = attend(mask=masks.causal(), backend=backend)
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


@either
def test_checkpointing_and_autocast_inside_a_graph(backend: str | None) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def part(q: Tensor) -> Tensor:
            return regard.trace(2 * q, k, v, mask=masks.causal(), backend=backend).out

        with torch.autocast(cases.DEVICE, dtype=torch.bfloat16):
            return checkpoint(part, q, use_reentrant=False)

    plain = [t.requires_grad_() for t in qkv()]
    compiled = [t.requires_grad_() for t in qkv()]
    wanted, got = call(*plain), whole(call)(*compiled)
    assert got.dtype == torch.bfloat16
    assert_close(got, wanted)
    wanted.float().square().sum().backward()
    got.float().square().sum().backward()
    for one, other in zip(compiled, plain, strict=True):
        assert_close(one.grad, other.grad)


class Attends(nn.Module):
    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend
        self.project = nn.Linear(8, 24)

    def parts(self, x: Tensor) -> list[Tensor]:
        split = self.project(x).chunk(3, dim=-1)
        return [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in split]

    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(*self.parts(x), mask=masks.causal(), backend=self.backend)


class Traces(Attends):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mask = masks.causal() & masks.window(3)
        t = regard.trace(*self.parts(x), mask=mask, softcap=5.0, backend=self.backend)
        return t.out, t.lse


@either
@pytest.mark.parametrize("kind", [Attends, Traces])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(kind: type[Attends], dynamic: bool, backend: str | None) -> None:
    torch.manual_seed(0)
    module = kind(backend).to(cases.DEVICE)
    x = numbers(3, 9, 8)
    shapes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}}
    program = torch.export.export(module, (x,), dynamic_shapes=shapes if dynamic else None)
    exported = program.module()
    assert_close(exported(x), module(x))
    if dynamic:
        for longer in (numbers(2, 30, 8), numbers(5, 4, 8)):
            assert_close(exported(longer), module(longer))


ANY = {
    "prefix": masks.causal() | masks.prefix(3),
    "window": masks.window(3, 2),
    "behind": masks.causal() & masks.window(3),
    "global": masks.window(2, 2) | masks.global_tokens([0]),
    "later": ~masks.causal(),
}


@pytest.mark.parametrize("name", ANY)
def test_one_exported_program_for_all_lengths(name: str) -> None:
    class Masked(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return regard.attention(q, k, v, mask=ANY[name])

    length = torch.export.Dim("length", min=2)
    program = torch.export.export(Masked(), tuple(qkv()), dynamic_shapes=({2: length},) * 3)
    exported = program.module()
    for n in (2, 9, 600):
        three = qkv(Q=n, K=n)
        assert_close(exported(*three), Masked()(*three))


OPERATOR_CALLS: dict[str, tuple[bool, Callable[[], dict[str, Any]]]] = {
    "plain": (True, lambda: {}),
    "without-statistics": (False, lambda: {"mask": masks.causal()}),
    "transposed": (True, lambda: {"mask": masks.causal()}),
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


@pytest.mark.parametrize("operator", ["tiled", TRITON])
@pytest.mark.parametrize("call", OPERATOR_CALLS)
def test_the_operator_keeps_its_promises(call: str, operator: str) -> None:
    if operator == "triton":
        import regard.backends.triton.operators  # noqa: F401 - registers it
    statistics, make = OPERATOR_CALLS[call]
    tensors = [t.requires_grad_() for t in qkv()]
    if call == "transposed":
        # As a projection is split into heads; and with the width not the last axis in memory.
        tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
        tensors[1] = tensors[1].mT.contiguous().mT
        tensors = [t.requires_grad_() for t in tensors]
    x = check(*tensors, **(DEFAULTS | make()))
    text, integers, floats, own = encode([x.comparison, x.mask, x.bias])
    args = (
        x.q, x.k, x.v, x.sink, x.seed, own, text, integers, floats, x.softcap, x.dropout,
        statistics, x.bias is not None,
    )  # fmt: skip
    there = getattr(torch.ops.regard, operator).default
    torch.library.opcheck(there, args)
    # The compiler believes what is said of the gradients' memory, so that is compared as well.
    with torch.no_grad():
        out, lse, _, entropy, kept = there(*args)
        rest = (*(t.detach() for t in args[:3]), *args[3:11], x.bias is not None)
        pulled = (numbers(*out.shape), None, None, out, lse, kept, entropy, *rest)
        back = getattr(torch.ops.regard, f"{operator}_backward").default
        torch.library.opcheck(back, pulled, test_utils="test_faketensor")
