"""The same call in other surroundings, and back: modes of PyTorch, watchers, transforms, compilers.

What is remembered of a call made in one must not answer it in another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import regard
from regard import RegardError, biases, masks
from tests.parity import cases
from tests.parity.calls.call import BASES, KINDS, Answer, Call, assert_each_right, draw, odd
from tests.torch_settings import deterministic, threads

# cuBLAS has no fixed order without it, and PyTorch looks once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
both = pytest.mark.parametrize(
    ("base", "kind"),
    [(base, kind) for base in BASES for kind in KINDS]
    if cases.DEVICE != "cpu"
    else [("odd", "attention"), ("common", "trace")],
)
both_kinds = pytest.mark.parametrize("kind", KINDS)


def causal(base: str, *, learned: bool = False) -> Call:
    call = BASES[base]().change(mask=masks.causal())
    return call.map_qkv(lambda t: t.requires_grad_()) if learned else call


class Overheard(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@contextmanager
def doubles_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "deterministic": deterministic,
    "two threads": partial(threads, 2),
    "float64 by default": doubles_by_default,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "a function mode": Overheard,
    "a dispatch mode": Dispatched,
    "no functions overridden": torch._C.DisableTorchFunctionSubclass,
    "a default device": lambda: torch.device(cases.DEVICE),
    "a dual level": forward_ad.dual_level,
}


@both
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("around", AROUND)
def test_a_mode(around: str, base: str, kind: str) -> None:
    one = causal(base, learned=True)
    modes = [nullcontext, AROUND[around]]
    for mode in (modes if base == "odd" else modes[::-1]) * 2:
        with mode():
            answer = one.ask(kind)
        one.assert_right(answer)


@both
def test_gradients_switched_off(base: str, kind: str) -> None:
    one = causal(base, learned=True)
    still = one.map_qkv(Tensor.detach)
    modes: list[Any] = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    for mode in (modes if base == "odd" else modes[::-1]) * 2:
        with mode():
            answer = one.ask(kind)
        out = answer.found["out"]
        assert out.requires_grad == (mode is torch.enable_grad)
        assert out.is_inference() == (mode is torch.inference_mode)
        (one if out.requires_grad else still).assert_right(answer)


@both
def test_tensors_made_in_inference_mode(base: str, kind: str) -> None:
    with torch.inference_mode():
        frozen = causal(base)
    for _ in range(2):
        assert_each_right(kind, [causal(base)])
        with torch.inference_mode():
            answer = frozen.ask(kind)
        causal(base).assert_right(answer)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, base: str, kind: str) -> None:
    """Inside, the answer is that of the lower precision; outside, of the tensors' own."""
    one = causal(base).map_qkv(Tensor.float)
    low = one.map_qkv(lambda t: t.to(dtype))
    for inside in ([True, False] if base == "odd" else [False, True]) * 2:
        with torch.autocast(cases.DEVICE, dtype=dtype, enabled=inside):
            answer = one.ask(kind)
        assert answer.found["out"].dtype == (dtype if inside else torch.float32)
        (low if inside else one).assert_right(answer)


@both_kinds
def test_deterministic_gradients_of_a_bias(kind: str) -> None:
    """Where a backend has no fixed order for it, another takes the call, and gives it back after.
    Refusals come and go with the mode."""
    table = draw(4, 5).requires_grad_()
    one = odd().change(bias=biases.relative(table))
    chosen = []
    for mode in (nullcontext, deterministic, nullcontext, deterministic):
        with mode():
            answer = one.ask(kind)
            plan = regard.plan(one.q, one.k, one.v, **one.options, statistics=kind == "trace")
        one.assert_right(answer)
        chosen.append((plan.backend, plan.refusals.get("triton")))
    assert chosen[0] == chosen[2]
    assert chosen[1] == chosen[3]
    if cases.DEVICE != "cpu":
        assert chosen[0][0] == "triton" != chosen[1][0]


# Whoever watches.


class Attends(nn.Module):
    def __init__(self, call: Call, kind: str) -> None:
        super().__init__()
        self.call, self.kind = call, kind

    def forward(self) -> Answer:
        return self.call.ask(self.kind)


@both
def test_a_watcher(base: str, kind: str) -> None:
    """Shown a trace each time it watches, also of a call that was made unwatched before."""
    one = causal(base)
    model = Attends(one, kind)
    for watched in ([False, True] if base == "odd" else [True, False]) * 2:
        if not watched:
            one.assert_right(model())
            continue
        with regard.watch(model, keep="traces") as seen:
            answer = model()
        one.assert_right(answer)
        (layer,) = seen.values()
        want = regard.trace(one.q, one.k, one.v, **one.options)
        assert_close(layer.trace.lse, want.lse)
        assert_close(layer.trace.received(), want.received())


# Transforms of functions.


def output(kind: str, call: Call) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kind == "attention":
            return regard.attention(q, k, v, **call.options)
        return regard.trace(q, k, v, **call.options).out

    return run


def mapped(run: Callable[..., Tensor], three: list[Tensor]) -> list[Tensor]:
    return [vmap(run)(*(t[None] for t in three))[0]]


def gradients(run: Callable[..., Tensor], three: list[Tensor]) -> list[Tensor]:
    return list(grad(lambda *x: run(*x).square().sum(), (0, 1, 2))(*three))


def tangents(run: Callable[..., Tensor], three: list[Tensor]) -> list[Tensor]:
    return list(jvp(run, tuple(three), tuple(t.flip(-1) for t in three)))


def mapped_gradients(run: Callable[..., Tensor], three: list[Tensor]) -> list[Tensor]:
    each = vmap(grad(lambda *x: run(*x).square().sum(), (0, 1, 2)))
    return [t[0] for t in each(*(t[None] for t in three))]


def checkpointed(run: Callable[..., Tensor], three: list[Tensor]) -> list[Tensor]:
    learned = [t.detach().requires_grad_() for t in three]
    out = checkpoint(run, *learned, use_reentrant=False)
    assert isinstance(out, Tensor)
    return list(torch.autograd.grad(out.square().sum(), learned))


TRANSFORMS = {f.__name__: f for f in (mapped, gradients, tangents, mapped_gradients, checkpointed)}


@both_kinds
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform(transform: str, kind: str) -> None:
    """The call, then the same under a transform, then the call: by the formula's derivatives."""
    one = odd().change(mask=masks.causal())
    three = [one.q, one.k, one.v]
    change = TRANSFORMS[transform]

    def exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, **one.options, backend="reference")

    want = change(exactly, [t.double() for t in three])
    for order in ("call", "transform", "call", "transform"):
        if order == "call":
            assert_each_right(kind, [one])
        else:
            got = change(output(kind, one), three)
            assert_close(got, [t.float() for t in want], rtol=1e-4, atol=2e-5)


# Tensors that are more, or less, than their numbers.


class Named(Tensor):
    """A subclass that adds nothing."""


class Tagged(Tensor):
    """A subclass that is asked about every function."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None):
        return super().__torch_function__(function, kinds, args, kwargs or {})


@both
@pytest.mark.parametrize("kind_of_tensor", [Named, Tagged])
def test_a_subclass(kind_of_tensor: type[Tensor], base: str, kind: str) -> None:
    one = causal(base)
    other = one.map_qkv(lambda t: t.as_subclass(kind_of_tensor))
    for call in ([one, other] if base == "odd" else [other, one]) * 2:
        answer = call.ask(kind)
        kept = {name: t.as_subclass(Tensor) for name, t in answer.found.items()}
        one.assert_right(Answer(kind, kept, []))


@both
def test_a_subclass_that_holds_other_tensors(base: str, kind: str) -> None:
    """It has no memory of its own: whoever reads at its address reads something else."""
    one = causal(base)
    half = one.map_qkv(lambda t: t / 2)
    three = zip((one.q, one.k, one.v), (half.q, half.k, half.v), strict=True)
    pair = Call(*(TwoTensor(a, b) for a, b in three), one.options)
    run = output(kind, one)
    wanted = [call.ask(kind) for call in (one, half)]
    for _ in range(2):
        for call, answer in zip((one, half), wanted, strict=True):
            call.assert_right(answer)
        got = run(pair.q, pair.k, pair.v)
        assert isinstance(got, TwoTensor)
        for part, answer in zip((got.a, got.b), wanted, strict=True):
            assert_close(part, answer.found["out"], rtol=2e-2, atol=1e-2)
        assert_each_right(kind, [one])


@both
def test_no_numbers_at_all(base: str, kind: str) -> None:
    """On the meta device and as fake tensors: shapes and types, and nothing stays behind."""
    one = causal(base)
    want = {name: (t.shape, t.dtype) for name, t in one.ask(kind).found.items()}
    shapes = [(t.shape, t.dtype) for t in (one.q, one.k, one.v)]

    def fake() -> dict[str, Tensor]:
        with FakeTensorMode():
            empty = [torch.empty(s, dtype=d, device=cases.DEVICE) for s, d in shapes]
            return ask(empty)

    def meta() -> dict[str, Tensor]:
        return ask([torch.empty(s, dtype=d, device="meta") for s, d in shapes])

    def ask(empty: list[Tensor]) -> dict[str, Tensor]:
        if kind == "attention":
            return {"out": regard.attention(*empty, **one.options)}
        t = regard.trace(*empty, **one.options)
        return {"out": t.out, "lse": t.lse, "entropy": t.entropy}

    # A trace has no numbers to give on the meta device, so there it is only fake.
    for make in (fake, meta, fake) if kind == "attention" else (fake, fake):
        assert_each_right(kind, [one])
        for name, t in make().items():
            assert (t.shape, t.dtype) == want[name]
    assert_each_right(kind, [one])


def test_a_refusal_by_name_does_not_stay() -> None:
    one = odd().change(softcap=2.0)
    for _ in range(2):
        with pytest.raises(RegardError, match="it has no soft-cap"):
            one.ask("attention", "sdpa")
        assert_each_right("attention", [one])
        with pytest.raises(RegardError, match="it keeps no row statistics"):
            one.ask("trace", "sdpa")
        assert_each_right("trace", [one])


# Graphs.

graphs = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"
)


@pytest.mark.compiled
@graphs
@both_kinds
def test_a_compiled_call_beside_a_plain_one(kind: str) -> None:
    """With two masks and two lengths, compiled and plain in turns."""
    one = odd()
    calls = [one.change(mask=m) for m in (None, masks.causal(), masks.window(5, 3))]
    calls.append(calls[1].change(k=one.k[:, :, 5:].contiguous(), v=one.v[:, :, 5:].contiguous()))
    functions = [
        torch.compile(output(kind, call), fullgraph=True, backend="aot_eager") for call in calls
    ]
    for _ in range(2):
        for call, function in zip(calls, functions, strict=True):
            want = call.ask(kind)
            call.assert_right(want)
            assert_close(function(call.q, call.k, call.v), want.found["out"], rtol=1e-4, atol=1e-5)


@pytest.mark.compiled
@graphs
@both_kinds
def test_an_export_leaves_nothing_behind(kind: str) -> None:
    one = odd().change(mask=masks.causal())

    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if kind == "attention":
                return regard.attention(q, k, v, mask=masks.causal())
            return regard.trace(q, k, v, mask=masks.causal()).out

    for _ in range(2):
        program = torch.export.export(Module(), (one.q, one.k, one.v))
        want = one.ask(kind)
        one.assert_right(want)
        got = program.module()(one.q, one.k, one.v)
        assert_close(got, want.found["out"], rtol=1e-4, atol=1e-5)
