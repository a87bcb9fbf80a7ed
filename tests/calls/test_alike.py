"""Whatever changes the kind of a call is seen by the guards of calls like it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx import Tracer
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard import masks
from regard.calls.alike import AVAILABLE, Alike, alike
from regard.calls.kinds import is_constant, kind_of, unshared
from tests.calls.test_kinds import CHANGES, Other, kind, tensor
from tests.torch_settings import deterministic, threads

MASK = masks.causal()
pytestmark = pytest.mark.skipif(
    not AVAILABLE, reason="this PyTorch has no such guards: kinds are asked for"
)


def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q


def given(**changed: Any) -> dict[str, Any]:
    call: dict[str, Any] = {name: tensor() for name in "qkv"}
    return call | {"mask": MASK, "scale": 0.5} | changed


def made(**changed: Any) -> Alike | None:
    call = given(**changed)
    found = kind_of(**call, softcap=None, backend=None, statistics=False)
    assert found is not None
    return alike(**call, kind=found, run=run)


def like(**changed: Any) -> Alike:
    found = made(**changed)
    assert found is not None
    return found


def test_calls_that_differ_in_numbers_are_alike() -> None:
    one = like()
    for _ in range(2):
        assert one.found(**given(q=torch.randn(1, 2, 6, 8))) is run
    assert one.found(**given(scale=float("0.5"))) is run


TABLE = torch.rand(1, 1, 1, 6) < 0.7


def test_masks_whose_tensors_were_made_for_them() -> None:
    """As of padding: nothing else writes to these."""
    for make in (
        lambda: unshared(masks.keep(TABLE.clone())),
        lambda: masks.causal() & unshared(masks.keep(TABLE.clone())),
        lambda: unshared(masks.padding(torch.tensor([4]))) & masks.window(3),
    ):
        mask = make()
        one = like(mask=mask)
        assert one.found(**given(mask=mask)) is run
        assert one.found(**given(mask=make())) is None
        assert one.found(**given()) is None


def test_masks_that_may_change_are_not_recognised() -> None:
    shared = masks.keep(TABLE)
    written = masks.where(lambda b, h, q, k: q >= k)
    for mask in (shared, masks.causal() & shared, ~shared, written, masks.causal() & written):
        assert not is_constant(mask)
    for mask in (masks.causal(), masks.window(2, 1) | masks.causal(0), unshared(masks.keep(TABLE))):
        assert is_constant(mask)


# What `attention` is asked for beyond that never comes here.
@pytest.mark.parametrize(
    "change", [c for c in CHANGES if c not in {"mask", "softcap", "backend", "statistics"}]
)
def test_what_changes_a_kind(change: str) -> None:
    changed = CHANGES[change] if change != "scale" else {"scale": 0.25}
    assert kind(**changed) != kind()
    assert like().found(**given(**changed)) is None
    assert like().found(**given()) is run


@pytest.mark.parametrize(
    "changed",
    [{"mask": None}, {"mask": masks.causal(0)}, {"mask": masks.window(3)}, {"scale": None},
     {"q": tensor(2, 6, 8)}, {"v": tensor().as_subclass(Other)}, {"k": tensor().to("meta")},
     {"q": torch.nn.Parameter(tensor(), requires_grad=False)}, {"k": torch._neg_view(tensor())},
     {"v": tensor().to_sparse()}],
    ids=["no mask", "another start", "a window", "no scale", "axes", "a subclass", "no numbers",
         "a parameter", "a negative view", "sparse"],
)  # fmt: skip
def test_other_calls(changed: dict[str, Any]) -> None:
    assert like().found(**given(**changed)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", "qkv")
def test_nested_tensors_and_what_is_no_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    one = like()
    for other in (torch.nested.nested_tensor([tensor(2, 6, 8)]), tensor().numpy(), None):
        assert one.found(**given(**{name: other})) is None


def test_a_whole_number_as_scale_is_looked_at() -> None:
    one = like(scale=2.0)
    assert one.found(**given(scale=2.0)) is run
    assert one.found(**given(scale=2)) is None


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a dual level": forward_ad.dual_level,
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_pytorch(state: str) -> None:
    call, one = given(), like()
    for _ in range(2):
        with STATES[state]():
            assert one.found(**call) is None
        assert one.found(**call) is run


def test_the_type_that_autocast_casts_to() -> None:
    half = {x: tensor(dtype=torch.bfloat16) for x in "qkv"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one = like(**half)
        assert one.found(**given(**half)) is run
    with torch.autocast("cpu", dtype=torch.float16):
        assert one.found(**given(**half)) is None
    assert one.found(**given(**half)) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
def test_transforms_and_tracers() -> None:
    call, one, found = given(), like(), []

    def ask(t: Tensor) -> Tensor:
        found.append(one.found(**call))
        return t + 1

    torch.func.vmap(ask)(torch.zeros(2))
    torch.func.grad(lambda t: ask(t).sum())(torch.zeros(2))
    torch.jit.trace(ask, torch.zeros(2), check_trace=False)
    for before_autograd in (False, True):
        make_fx(ask, pre_dispatch=before_autograd)(torch.zeros(2))
    assert found == [None] * 5
    assert one.found(**call) is run


@pytest.mark.parametrize(
    "mode",
    [FunctionalTensorMode, lambda: ProxyTorchDispatchMode(Tracer(), "real")],
    ids=["functional", "proxies"],
)
def test_modes_of_the_compiler(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    call, one = given(), like()
    with mode():
        assert kind_of(**call, softcap=None, backend=None, statistics=False) is None
        assert one.found(**call) is None
    assert one.found(**call) is run


def test_what_guards_cannot_tell_is_never_alike() -> None:
    x = tensor()
    assert made(q=x, k=x, v=x) is None
    assert made(q=torch.zeros(97)[1:].view(1, 2, 6, 8)) is None


def test_a_mask_that_may_change_is_never_alike() -> None:
    @dataclass
    class Reach(masks.Mask):
        width: int

    assert made(mask=Reach(3)) is None
    assert made(mask=MASK & Reach(3)) is None


def test_nothing_of_the_call_is_held() -> None:
    call = given()
    one = like(**call)
    held = [weakref.ref(call[name]) for name in "qkv"]
    call.clear()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    assert one.found(**given()) is run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flags of kernels on a card")
def test_the_kernels_that_a_card_may_use() -> None:
    call = given(**{x: tensor().cuda() for x in "qkv"})
    one = like(**call)
    for _ in range(2):
        assert one.found(**call) is run
        with sdpa_kernel(SDPBackend.MATH):
            assert one.found(**call) is None
    assert one.found(**given()) is None
