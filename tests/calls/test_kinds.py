"""Calls of one kind are run alike, so whatever decides how a call is run changes its kind."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import biases, masks
from regard.calls import dispatch, kinds, remembered
from regard.calls.kinds import kind_of, kind_with_more, marked, step_of, unshared
from tests.torch_settings import deterministic, threads


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (1, 2, 6, 8), dtype=dtype)


def kind(**changed: Any) -> Any:
    given: dict[str, Any] = {name: tensor() for name in "qkv"}
    given |= {"mask": None, "scale": None, "softcap": None, "backend": None, "statistics": False}
    return kind_of(**(given | changed))


def displaced(t: Tensor) -> Tensor:
    return torch.zeros(t.numel() + 1)[1:].view(t.shape)


CHANGES: dict[str, dict[str, Any]] = {
    **{f"length of {x}": {x: tensor(1, 2, 7, 8)} for x in "qkv"},
    **{f"strides of {x}": {x: tensor(1, 6, 2, 8).transpose(1, 2)} for x in "qkv"},
    **{f"address of {x}": {x: displaced(tensor())} for x in "qkv"},
    **{f"type of {x}": {x: tensor(dtype=torch.float64)} for x in "qkv"},
    **{f"{x} learns": {x: tensor().requires_grad_()} for x in "qkv"},
    "mask": {"mask": masks.causal()},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 3.0},
    "backend": {"backend": "tiled"},
    "statistics": {"statistics": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_asked_for(change: str) -> None:
    assert kind() == kind()
    assert kind(**CHANGES[change]) == kind(**CHANGES[change]) is not None
    assert kind(**CHANGES[change]) != kind()


@pytest.mark.parametrize(
    "state",
    [torch.no_grad, torch.inference_mode, deterministic, lambda: threads(3),
     lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["no gradients", "inference", "deterministic", "threads", "autocast"],
)  # fmt: skip
def test_the_state_of_pytorch(state: Callable[[], AbstractContextManager[Any]]) -> None:
    half = {x: tensor(dtype=torch.bfloat16) for x in "qkv"}
    outside = kind(**half)
    with threads(1) if torch.get_num_threads() == 3 else nullcontext(), state():
        inside = kind(**half)
    assert inside is not None
    assert inside != outside


def test_tensors_made_for_inference_are_not_kept_for_other_calls() -> None:
    with torch.no_grad():
        plain = kind()
    with torch.inference_mode():
        assert kind() != plain


def test_which_of_the_tensors_lies_elsewhere() -> None:
    found = [kind(**{x: displaced(tensor()) for x in which}) for which in ("q", "k", "v", "kv")]
    assert len({kind(), *found}) == 5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_lengths_or_places_have_no_kind() -> None:
    for x in "qkv":
        assert kind(**{x: tensor().to_sparse()}) is None
        assert kind(**{x: torch.nested.nested_tensor([tensor(2, 6, 8)])}) is None


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["all", "causal"])
@pytest.mark.parametrize("learns", [False, True], ids=["numbers", "learned"])
def test_tensors_that_are_not_what_lies_in_memory(mask: masks.Mask | None, learns: bool) -> None:
    plain = [torch.randn(1, 2, 6, 8, requires_grad=learns) for _ in range(3)]
    for _ in range(2):
        regard.trace(*plain, mask=mask)
    for i in range(3):
        for stands_for, told in (
            (-plain[i], torch._neg_view(plain[i])),
            (torch.zeros(1, 2, 6, 8), torch._efficientzerotensor((1, 2, 6, 8))),
        ):
            given, same = ([*plain[:i], t, *plain[i + 1 :]] for t in (told, stands_for))
            found, right = (regard.trace(*t, mask=mask) for t in (given, same))
            torch.testing.assert_close(found.out, right.out)
            torch.testing.assert_close(found.received(), right.received())
            for backend in (None, "tiled", "sdpa"):
                out = regard.attention(*given, mask=mask, backend=backend)
                torch.testing.assert_close(out, right.out)
            if learns:
                wanted = [t for t in plain if t is not plain[i]]
                torch.testing.assert_close(
                    *(torch.autograd.grad(t.out.square().sum(), wanted) for t in (found, right))
                )


def test_masks_that_hide_the_same_are_one_kind() -> None:
    assert kind(mask=masks.causal() & masks.window(3)) == kind(
        mask=masks.causal() & masks.window(3)
    )
    assert kind(mask=masks.window(3)) != kind(mask=masks.window(4))


def test_a_mask_that_changes_is_another_kind() -> None:
    @dataclass(eq=False)
    class Reach(masks.Mask):
        width: int

        def allowed(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q - k).abs() < self.width

    mask = Reach(3)
    for whole in (mask, masks.causal() & mask):
        before = kind(mask=whole)
        mask.width += 1
        assert before != kind(mask=whole) == kind(mask=whole) is not None


def test_a_mask_of_which_only_its_owner_knows_the_parts_has_no_kind() -> None:
    class Reach(masks.Mask):
        def __init__(self, width: int) -> None:
            self.width = width

    assert kind(mask=Reach(3)) is None
    assert kind(mask=masks.causal() & Reach(3)) is None


class Other(Tensor):
    pass


@pytest.mark.parametrize(
    "given",
    [{"mask": masks.padding([3])}, {"mask": masks.causal() & masks.keep(torch.ones(6, 6).bool())},
     {"mask": masks.where(lambda b, h, q, k: q >= k)}, {"q": tensor(2, 6, 8)},
     {"v": tensor().as_subclass(Other)}, {"k": tensor().to("meta")}, {"scale": 2}],
    ids=["tensors", "tensors inside", "a function", "axes", "a subclass", "no numbers",
         "a whole number as scale"],
)  # fmt: skip
def test_what_must_be_looked_at_each_time(given: dict[str, Any]) -> None:
    assert kind(**given) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch")
def test_nobody_is_remembered_under_transforms_and_modes() -> None:
    found: list[Hashable | None] = []

    def ask(t: Tensor) -> Tensor:
        found.append(kind())
        return t

    torch.func.vmap(ask)(torch.zeros(2))
    with forward_ad.dual_level():
        ask(torch.zeros(2))
    with FlopCounterMode(display=False):
        ask(torch.zeros(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Numbers of another type are cast first.
        ask(torch.zeros(2))
    make_fx(ask, pre_dispatch=True)(torch.zeros(2))
    torch.jit.trace(ask, torch.zeros(2), check_trace=False)
    assert found == [None] * 6


@pytest.mark.parametrize("ask", ["out", "entropy"])
def test_a_graph_that_is_recorded_before_autograd_holds_the_call(ask: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = getattr(regard.trace(q, k, v, mask=masks.causal()), ask)
        return found

    first, other = torch.randn(2, 3, 1, 2, 6, 8)
    for _ in range(2):
        recorded = make_fx(run, pre_dispatch=True)(*first)
        torch.testing.assert_close(recorded(*other), run(*other))


def test_masks_with_tensors_of_a_cpu_have_no_kind() -> None:
    """NumPy may write to them, and nobody counts that."""
    x = torch.randn(1, 1, 6, 4)
    ids = numpy.zeros(6, dtype=numpy.int64)
    mask = masks.documents(torch.from_numpy(ids))
    before = regard.attention(x, x, x, mask=mask)
    ids[3:] = 1
    after = regard.attention(x, x, x, mask=mask)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, regard.attention(x, x, x, mask=mask, backend="reference"))


def test_masks_with_tensors_that_nobody_shares_are_known_until_they_are_written_to() -> None:
    x = torch.randn(2, 1, 6, 4)
    real = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    mask = masks.causal() & unshared(masks.keep(real[:, None, None]))
    here = torch.device("cpu")
    first = marked(mask, here)
    assert first is not None
    assert marked(masks.causal() & masks.keep(real[:, None, None]), here) is None
    for place in range(3):
        for _ in range(2):
            found = regard.attention(x, x, x, mask=mask)
            right = regard.attention(x, x, x, mask=mask, backend="reference")
            torch.testing.assert_close(found, right)
        real[1, place] = False
        assert marked(mask, here) != first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only tensors on a card are marked")
def test_masks_with_tensors_on_a_card_are_known_until_they_change() -> None:
    x = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(300, device="cuda") // 100

    def attended() -> torch.Tensor:
        mask = masks.causal() & masks.documents(ids)
        assert marked(mask, x.device) is not None
        found = [regard.trace(x, x, x, mask=mask) for _ in range(2)]
        right = regard.attention(x, x, x, mask=mask, backend="reference")
        for t in found:
            torch.testing.assert_close(t.out, right, atol=2e-2, rtol=2e-2)
        return found[-1].out

    before = attended()
    ids += torch.arange(300, device="cuda") // 50
    assert not torch.allclose(before, attended())
    # Other masks whose tensors come to lie at the same place.
    for size in (30, 70, 110):
        ids = torch.arange(300, device="cuda") // size
        attended()
    for _ in range(40):
        attended()
        ids = ids.clone()


def test_steps_of_generating_are_one_kind_of_call() -> None:
    def step(keys: int, heads: int = 1, mask: masks.Mask | None = None, **how: Any) -> Any:
        k, v = tensor(1, heads, keys, 8), tensor(1, heads, keys, 8)
        found: Any = kind(q=tensor(1, 2, 1, 8), k=k, v=v, mask=mask, **how)
        return step_of(found)

    assert step(33) is not None
    assert step(33) == step(34) == step(63, mask=masks.causal())
    assert len({step(33), step(64), step(33, heads=2), step(33, scale=0.5)}) == 4
    for other in (masks.causal(0), masks.window(9)):
        assert step(33, mask=other) is None
    shifted = tensor(1, 1, 33, 9)[..., :8]
    assert step_of(kind(q=tensor(1, 2, 1, 8), k=shifted, v=tensor(1, 1, 33, 8))) != step(33)
    assert step_of(kind(q=tensor(1, 2, 1, 8), k=tensor(1, 1, 33, 8), v=shifted)) != step(33)
    # Which axes lie side by side in memory counts as well.
    q, wide = tensor(1, 2, 1, 8), tensor(1, 1, 33, 16)
    plain = {"q": q, "k": wide[..., :8], "v": wide[..., :8]}
    for name, other in {"q": tensor(1, 2, 1, 16)[..., ::2], "k": wide[..., ::2],
                        "v": wide[..., ::2]}.items():  # fmt: skip
        assert step_of(kind(**plain | {name: other})) not in {None, step_of(kind(**plain))}
    assert step_of(kind(q=q, k=tensor(1, 1, 33, 8), v=tensor(1, 1, 34, 8))) is None
    assert step(1) is None
    assert step(33, statistics=True) is None


def test_a_step_is_checked_once_and_right_for_any_number_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[int] = []
    check = dispatch.check

    def counted(*given: Any, **how: Any) -> Any:
        checked.append(given[1].shape[2])
        return check(*given, **how)

    monkeypatch.setattr(dispatch, "check", counted)
    monkeypatch.setattr(remembered, "KNOWN", {})
    monkeypatch.setattr(remembered, "RECENT", {False: (), True: ()})
    q = torch.randn(1, 4, 1, 8)
    for keys in (40, 41, 42, 63):
        k, v = torch.randn(2, 1, 2, keys, 8)
        out = regard.attention(q, k, v, mask=masks.causal())
        weights = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).softmax(-1)
        torch.testing.assert_close(out, weights @ v.repeat_interleave(2, 1))
    assert checked == [40]
    # One query alone may still see less, and then it is another call.
    k, v = torch.randn(2, 1, 2, 50, 8)
    alone = regard.attention(q, k, v, mask=masks.causal(0))
    torch.testing.assert_close(alone, v[:, :, :1].repeat_interleave(2, 1))


SINK = torch.zeros(2)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with more have kinds on a GPU alone."""
    monkeypatch.setattr(kinds, "_on_gpu", lambda q: True)


def kind_with(**changed: Any) -> Any:
    given: dict[str, Any] = {name: tensor() for name in "qkv"}
    given |= {"mask": None, "scale": None, "softcap": None, "backend": None, "statistics": False}
    given |= {"bias": None, "sink": SINK, "dropout": 0.0, "training": True}
    return kind_with_more(**(given | changed))


MORE: dict[str, dict[str, Any]] = {
    **CHANGES,
    "another sink": {"sink": SINK.clone()},
    "a part of it": {"sink": SINK[:1]},
    "none": {"sink": None},
    "dropout": {"dropout": 0.1},
    "more of it": {"dropout": 0.2},
}


@pytest.mark.usefixtures("on_gpu")
def test_more_that_is_asked_for() -> None:
    found = [kind_with(), *(kind_with(**change) for change in MORE.values())]
    assert None not in found
    assert len(set(found)) == len(found)
    assert kind_with(dropout=0.1, training=False) == kind_with()


@pytest.mark.usefixtures("on_gpu")
def test_a_sink_that_was_written_to_is_another() -> None:
    sink = torch.zeros(2)
    before = kind_with(sink=sink)
    sink += 1
    assert kind_with(sink=sink) != before


def _made_for_inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(2)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "change",
    {
        "a sink that learns": {"sink": torch.zeros(2, requires_grad=True)},
        "one that counts no writes": {"sink": _made_for_inference()},
        "a negative view": {"sink": torch._neg_view(torch.zeros(2))},
        "a dense bias": {"bias": biases.dense(torch.zeros(6, 6))},
        "all dropped": {"dropout": 1.0},
        "too much": {"dropout": 1.5, "training": False},
    }.items(),
    ids=lambda item: item[0],
)
def test_what_has_no_kind_with_more(change: tuple[str, dict[str, Any]]) -> None:
    assert kind_with(**change[1]) is None


@pytest.mark.usefixtures("on_gpu")
def test_nothing_is_asked_of_tensors_under_transforms() -> None:
    """Some have no memory."""
    asked: list[object] = []

    def call(sink: Tensor) -> Tensor:
        asked.append(kind_with(sink=sink))
        asked.append(kind_with(bias=biases.alibi(sink), sink=None))
        return sink.sum()

    torch.func.vmap(call)(torch.zeros(3, 2))
    torch.func.grad(call)(SINK)
    torch.func.jvp(call, (SINK,), (SINK,))
    assert asked == [None] * 6
