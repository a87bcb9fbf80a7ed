"""Calls of training that come again run as they were made ready once, with gradients of their
own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.backends.tiled import call_memory, pieces, prepared_training
from regard.backends.tiled.loop import PULL_AGAIN, Pull, loop_for
from regard.backends.tiled.plan import Plan
from regard.calls import remembered
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.scores.comparison import Dot
from tests.backends.tiled.test_prepared_call import SHAPES, inputs

LOOP: Any = loop_for(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(LOOP is None, reason="there is no compiled loop")
MASKS: dict[str, Callable[[int, int], Mask | None]] = {
    "none": lambda Q, K: None,
    "causal": lambda Q, K: masks.causal(),
    "window": lambda Q, K: masks.window(3, 1),
    "table": lambda Q, K: masks.keep(torch.arange(Q * K).view(Q, K) % 5 < 3),
}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "KNOWN", {})
    monkeypatch.setattr(remembered, "RECENT", {False: (), True: ()})


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of each backward pass that was made ready."""
    found: list[int] = []
    pull_again = LOOP.pull_again

    def counted(packed: bytes) -> int:
        found.append(PULL_AGAIN.unpack(packed)[-1])
        return int(pull_again(packed))

    monkeypatch.setattr(LOOP, "pull_again", counted)
    return found


def draw(shape: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(each, generator=source).to(dtype) for each in SHAPES[shape]]


def learned(given: list[Tensor], double: bool = False) -> list[Tensor]:
    return [(t.detach().double() if double else t.detach()).requires_grad_() for t in given]


Loss = Callable[[Any], Tensor]
"""Of a trace, or of its rows."""


def gradients(
    given: list[Tensor], loss: Loss, mask: Mask | None, backend: str
) -> tuple[Tensor, ...]:
    found = regard.trace(*given, mask=mask, backend=backend)
    return torch.autograd.grad(loss(found), [t for t in given if t.requires_grad])


def assert_right(given: list[Tensor], loss: Loss, mask: Mask | None, again: Any = None) -> None:
    """Of a trace; or of a call as it was made ready."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    expected = gradients(wide, loss, mask, "reference")
    if again is None:
        found = gradients(given, loss, mask, "tiled")
    else:
        found = torch.autograd.grad(loss(again(*given)), given)
    for mine, exact in zip(found, expected, strict=True):
        most = float(exact.abs().max())
        torch.testing.assert_close(mine, exact.float(), rtol=1e-5, atol=1e-5 * most)


def weighted(x: Any) -> Tensor:
    """A loss of which every gradient is another."""
    numbers = torch.arange(x.out.numel(), dtype=torch.float64).mul(0.7).sin()
    return (x.out * numbers.view_as(x.out).to(x.out.dtype)).sum()


LOSSES: dict[str, Loss] = {
    "weighted": weighted,
    # Of these the gradients lie in memory otherwise.
    "alike": lambda x: x.out.sum(),
    "turned": lambda x: x.out.mT.contiguous().sin().sum(),
    # These take the whole path.
    "lse": lambda x: weighted(x) + x.lse.sin().sum(),
    "entropy": lambda x: weighted(x) + x.entropy.sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_formula(
    shape: str, mask: str, loss: str, pulled: list[int]
) -> None:
    q, k, _ = SHAPES[shape]
    how = MASKS[mask](q[2], k[2])
    again = prepared_training.prepared_to_learn(
        inputs(*learned(draw(shape)), mask=how), statistics=True
    )
    if mask == "table" and shape == "several tiles":
        assert again is None
        return
    for seed in range(3):
        assert_right(learned(draw(shape, seed)), LOSSES[loss], how, again)
    assert bool(pulled) == (loss in ("weighted", "alike", "turned"))


@pytest.mark.parametrize("which", range(3))
def test_some_learn_and_others_do_not(which: int, pulled: list[int]) -> None:
    for seed in range(3):
        given = [t.requires_grad_(i == which) for i, t in enumerate(draw("grouped", seed))]
        assert_right(given, weighted, masks.causal())
    assert len(pulled) == 3


def test_one_tensor_for_all_three() -> None:
    for seed in range(3):
        given = draw("plain", seed)[0].requires_grad_()
        wide = given.detach().double().requires_grad_()
        found, exact = (
            torch.autograd.grad(weighted(regard.trace(x, x, x, backend=name)), x)[0]
            for x, name in ((given, "tiled"), (wide, "reference"))
        )
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("asked", [regard.trace, regard.attention])
def test_outputs_are_those_of_a_call_that_learns_nothing(asked: Any) -> None:
    for seed in range(3):
        given = draw("several tiles", seed)
        with torch.no_grad():
            alone = regard.trace(*given, mask=masks.causal(), backend="tiled")
        found = asked(*learned(given), mask=masks.causal(), backend="tiled")
        if asked is regard.attention:
            assert torch.equal(found, alone.out)
            continue
        for name in ("out", "lse", "max_logit", "entropy"):
            assert torch.equal(getattr(found, name), getattr(alone, name)), name


@pytest.mark.parametrize("ill", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(3))
def test_masked_numbers_that_are_not_finite_do_no_harm(
    which: int, ill: float, pulled: list[int]
) -> None:
    """Query 0 sees no key, and no query sees key 4."""
    for seed in range(3):
        given = draw("plain", seed)
        given[which][0, 1, 0 if which == 0 else 4] = ill
        assert_right(learned(given), weighted, masks.causal(offset=-1))
    assert len(pulled) == 3


def test_rows_that_see_nothing() -> None:
    for seed in range(3):
        assert_right(learned(draw("grouped", seed)), weighted, masks.causal(offset=-3))


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mask", MASKS)
def test_several_hands_in_several_lots(
    mask: str, pulled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LOT", 1)
    q, k, v = (torch.randn(1, 1, 400, width) for width in (8, 8, 6))
    # Tables of a mask are made of short calls alone.
    how = MASKS[mask](400, 400)
    with threads(3):
        assert Plan.of(AttentionInputs(q, k, v, Dot(1.0)), LOOP).hands == 3
        for _ in range(3):
            assert_right(learned([q, k, v]), weighted, how)
    lots = 0 if mask == "table" else 3 * 4
    assert pulled == [3] * lots


def test_threads_of_the_backward_pass_are_those_of_the_kind() -> None:
    given = [torch.randn(1, 1, 400, 8) for _ in range(3)]
    for _ in range(2):
        with threads(3):
            mine = learned(given)
            loss = weighted(regard.trace(*mine, backend="tiled"))
        with threads(1):
            found = torch.autograd.grad(loss, mine)
    wide = learned(given, double=True)
    for one, exact in zip(found, gradients(wide, weighted, None, "reference"), strict=True):
        torch.testing.assert_close(one, exact.float(), atol=1e-5, rtol=1e-5)


def test_memory_is_not_read_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*how: Any) -> Tensor:
        made: Tensor = call_memory._through_the_dispatcher(*how)
        return made.fill_(255 if made.dtype == torch.uint8 else math.nan)

    monkeypatch.setattr(call_memory, "_spare", [])
    monkeypatch.setattr(call_memory, "empty", empty)
    monkeypatch.setattr(prepared_training, "empty", empty)
    for shape in SHAPES:
        for mask in (None, masks.causal(), masks.window(2)):
            for seed in range(3):
                assert_right(learned(draw(shape, seed)), weighted, mask)


def test_gradients_are_asked_for_twice() -> None:
    for seed in range(3):
        given = learned(draw("grouped", seed))
        loss = weighted(regard.trace(*given, mask=masks.causal(), backend="tiled"))
        first = torch.autograd.grad(loss, given, retain_graph=True)
        for one, other in zip(first, torch.autograd.grad(loss, given), strict=True):
            assert torch.equal(one, other)


def test_saved_tensors_that_come_back_in_another_layout(pulled: list[int]) -> None:
    def turned(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT if t.ndim > 1 else t

    for seed in range(3):
        with torch.autograd.graph.saved_tensors_hooks(turned, lambda t: t):
            assert_right(learned(draw("plain", seed)), weighted, masks.causal())
    assert not pulled


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_saved_tensors_that_come_back_in_another_type(
    dtype: torch.dtype, pulled: list[int]
) -> None:
    for seed in range(3):
        given = learned(draw("several tiles", seed))
        wide = learned(given, double=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(dtype), lambda t: t):
            found = gradients(given, weighted, masks.causal(), "tiled")
        expected = gradients(wide, weighted, masks.causal(), "reference")
        for mine, exact in zip(found, expected, strict=True):
            assert (mine - exact).abs().max() <= 4 * torch.finfo(dtype).eps * 2 + 1e-5
    assert not pulled


@pytest.mark.parametrize("backend", ["tiled", "reference", "sdpa"])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=str)
def test_gradients_that_are_not_what_lies_in_their_memory(backend: str, mask: Mask | None) -> None:
    """A view that stands for the negative, and autograd's zeros, which have no memory."""
    given = learned(draw("grouped"))
    for _ in range(3):
        out = regard.attention(*given, mask=mask, backend=backend)
    g = torch.randn(out.shape)
    plain = torch.autograd.grad(out, given, -g, retain_graph=True)
    turned = torch.autograd.grad(out, given, torch._neg_view(g), retain_graph=True)
    zeros = torch.autograd.grad(out, given, torch._efficientzerotensor(g.shape))
    for mine, exact, nothing in zip(turned, plain, zeros, strict=True):
        torch.testing.assert_close(mine, exact)
        assert not nothing.any()


def test_a_loop_that_is_not_there_any_more_is_not_called(
    pulled: list[int], request: pytest.FixtureRequest
) -> None:
    given = learned(draw("plain"))
    for _ in range(2):
        loss = weighted(regard.trace(*given, mask=masks.causal(), backend="tiled"))
    request.getfixturevalue("uncompiled")
    found = torch.autograd.grad(loss, given)
    assert not pulled
    wide = learned(given, double=True)
    for one, exact in zip(
        found, gradients(wide, weighted, masks.causal(), "reference"), strict=True
    ):
        torch.testing.assert_close(one, exact.float(), atol=1e-5, rtol=1e-5)
    assert_right(given, weighted, masks.causal())


def test_threads_do_not_share_memory() -> None:
    calls = [learned(draw("several tiles", seed)) for seed in range(8)]
    alone = [gradients(x, weighted, masks.causal(), "tiled") for x in calls]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda x: gradients(x, weighted, masks.causal(), "tiled"), calls * 4)
    for mine, right in zip(found, alone * 4, strict=True):
        assert all(map(torch.equal, mine, right))


def test_a_kind_knows_its_structure() -> None:
    """A field that is missing on one of the two sides would shift all that come after it."""
    assert Pull.fresh.offset == max(field.offset for field in _fields(Pull))


def _fields(kind: type[Pull]) -> list[Any]:
    return [getattr(kind, name) for name, *_ in kind._fields_]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_takes_the_whole_path(dtype: torch.dtype, pulled: list[int]) -> None:
    for seed in range(3):
        given = learned(draw("plain", seed, dtype))
        found = gradients(given, weighted, masks.causal(), "tiled")
        wide = learned(given, double=True)
        for one, exact in zip(
            found, gradients(wide, weighted, masks.causal(), "reference"), strict=True
        ):
            assert (one.double() - exact).abs().max() <= 2**-6 * exact.abs().max()
    assert not pulled
