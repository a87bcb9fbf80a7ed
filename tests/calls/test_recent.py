"""Calls like one of the last are recognised before anything else is asked, and no others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, scores
from regard.calls import dispatch, remembered
from regard.calls.alike import AVAILABLE
from regard.calls.remembered import recent
from regard.calls.watchers import begin, end
from tests.calls.test_alike import STATES
from tests.calls.test_kinds import CHANGES, tensor

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this PyTorch has no such guards")
CAUSAL = masks.causal()


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "KNOWN", {})
    monkeypatch.setattr(remembered, "RECENT", {False: (), True: ()})


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kinds that were asked for."""
    asked: list[Any] = []
    kind_of = dispatch.kind_of

    def counted(*given: Any) -> Any:
        asked.append(kind_of(*given))
        return asked[-1]

    monkeypatch.setattr(dispatch, "kind_of", counted)
    return asked


def numbers(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, 6, 8, generator=source).to(dtype) for _ in range(3)]


ASKED: dict[str, Callable[..., Tensor]] = {
    "attention": regard.attention,
    "trace": lambda *given, **how: regard.trace(*given, **how).out,
}


def right(given: list[Tensor], **how: Any) -> Tensor:
    wide = {name: t.double() if isinstance(t, Tensor) else t for name, t in how.items()}
    return regard.attention(*(t.double() for t in given), **wide, backend="reference")


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["all", "causal"])
@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("asked", ASKED)
def test_what_came_again_is_not_asked_for_its_kind(
    asked: str, backend: str | None, mask: Any, kinds: list[Any]
) -> None:
    for seed in range(5):
        given = numbers(seed)
        kinds.clear()
        found = ASKED[asked](*given, mask=mask, backend=backend)
        assert len(kinds) == (seed < 2)
        torch.testing.assert_close(found, right(given, mask=mask).float())


@pytest.mark.parametrize("asked", ASKED)
def test_calls_that_take_turns(asked: str, kinds: list[Any]) -> None:
    turns = [(seed, mask) for seed in range(5) for mask in (None, CAUSAL)]
    expected = [right(numbers(seed), mask=mask).float() for seed, mask in turns]
    for (seed, mask), exact in zip(turns, expected, strict=True):
        given = numbers(seed)
        kinds.clear()
        found = ASKED[asked](*given, mask=mask)
        assert len(kinds) == (seed < 2)
        torch.testing.assert_close(found, exact)
    for mask in (masks.window(1), masks.window(2), masks.window(3)):
        for _ in range(3):
            ASKED[asked](*given, mask=mask)
    for last in remembered.RECENT.values():
        assert len(last) <= remembered._LAST


@pytest.mark.parametrize("asked", ASKED)
def test_another_mask_that_says_the_same_is_recognised_once_it_stays(
    asked: str, kinds: list[Any]
) -> None:
    """As of a model that is built or loaded again. One that is made for each call is not waited
    for."""
    for mask in (CAUSAL, masks.causal(), masks.causal()):
        asked_for = []
        for seed in range(4):
            kinds.clear()
            found = ASKED[asked](*numbers(seed), mask=mask)
            asked_for.append(len(kinds))
            torch.testing.assert_close(found, right(numbers(seed), mask=mask).float())
        assert asked_for == [1, 1, 0, 0]
    for seed in range(4):
        kinds.clear()
        ASKED[asked](*numbers(seed), mask=masks.causal())
        assert len(kinds) == 1


OPTIONS: dict[str, dict[str, Any]] = {
    "a mask": {"mask": masks.window(1)},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "sink": {"sink": torch.tensor([0.5, -1.0])},
    "bias": {"bias": biases.alibi([0.5, 0.1])},
    "score": {"score": scores.distance()},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("asked", ASKED)
def test_what_else_is_asked_for(asked: str, option: str) -> None:
    given = numbers()
    plain = [ASKED[asked](*given) for _ in range(3)]
    for _ in range(3):
        found = ASKED[asked](*given, **OPTIONS[option])
        torch.testing.assert_close(found, right(given, **OPTIONS[option]).float())
        assert not torch.allclose(found, plain[0])
        assert torch.equal(ASKED[asked](*given), plain[0])


@pytest.mark.parametrize("asked", ASKED)
def test_the_backend_that_is_asked_for_is_the_one_that_runs(asked: str, kinds: list[Any]) -> None:
    given = numbers()
    for _ in range(3):
        ASKED[asked](*given, backend="tiled")
    before = len(kinds)
    ASKED[asked](*given, backend="reference")
    assert len(kinds) == before + 1
    with pytest.raises(regard.RegardError, match="unknown backend"):
        ASKED[asked](*given, backend="none such")
    with pytest.raises(regard.RegardError, match="has no argument"):
        ASKED[asked](*given, backend="tiled", is_causal=True)


def test_dropout_is_not_left_out() -> None:
    given = numbers()
    plain, *_ = (regard.attention(*given) for _ in range(3))
    assert torch.equal(regard.attention(*given, dropout=0.5), plain)
    assert not torch.allclose(regard.attention(*given, dropout=0.5, training=True), plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("asked", ASKED)
def test_nested_tensors_are_refused_as_before(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    given = numbers()
    for _ in range(3):
        ASKED[asked](*given)
    with pytest.raises(regard.RegardError, match="nested tensor in the strided layout"):
        ASKED[asked](*(torch.nested.nested_tensor([t[0]]) for t in given))


@pytest.mark.parametrize("asked", ASKED)
def test_ends_of_sequences_are_not_left_out(asked: str) -> None:
    given = numbers()
    for _ in range(3):
        ASKED[asked](*given)
    with pytest.raises(regard.RegardError):
        ASKED[asked](*given, cu_seqlens=torch.tensor([0, 6]))


def test_steps_of_generating_take_the_place_of_no_other(kinds: list[Any]) -> None:
    """They are of one kind, but each has one key more than the one before."""
    given = numbers()
    for keys in range(32, 40):
        q, k, v = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, keys, 8).unbind()
        step = regard.attention(q, k, v, mask=CAUSAL)
        torch.testing.assert_close(step, right([q, k, v], mask=CAUSAL).float())
        kinds.clear()
        for mask in (None, CAUSAL):
            regard.attention(*given, mask=mask)
        assert bool(kinds) == (keys < 34)


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("asked", ASKED)
def test_what_came_again_before_watchers_is_not_asked_for_its_kind(
    asked: str, backend: str | None, kinds: list[Any]
) -> None:
    shown: list[regard.Trace] = []
    expected = [right(numbers(seed), mask=CAUSAL).float() for seed in range(5)]
    begin(shown.append)
    try:
        for seed, exact in enumerate(expected):
            kinds.clear()
            found = ASKED[asked](*numbers(seed), mask=CAUSAL, backend=backend)
            assert torch.equal(shown[-1].out, found)
            torch.testing.assert_close(found, exact)
            # What a backend gives that is asked for by name is looked at from its inputs.
            known = seed > 1 and (backend is None or asked == "trace")
            assert bool(kinds) != known
    finally:
        end(shown.append)
    found = ASKED[asked](*numbers(), mask=CAUSAL, backend=backend)
    torch.testing.assert_close(found, expected[0])
    assert len(shown) == 5


@pytest.mark.parametrize("asked", ASKED)
def test_watchers_are_shown_what_came_again(asked: str) -> None:
    given = numbers()
    for _ in range(3):
        ASKED[asked](*given)
    shown: list[regard.Trace] = []
    begin(shown.append)
    try:
        found = [ASKED[asked](*given) for _ in range(3)]
    finally:
        end(shown.append)
    assert len(shown) == 3
    assert torch.equal(shown[-1].out, found[-1])
    ASKED[asked](*given)
    assert len(shown) == 3


@pytest.mark.parametrize(
    "change", [c for c in CHANGES if c not in {"mask", "softcap", "statistics", "backend"}]
)
@pytest.mark.parametrize("statistics", [False, True])
def test_what_changes_a_kind(change: str, statistics: bool) -> None:
    def looked(**changed: Any) -> Any:
        given = {name: tensor() for name in "qkv"} | {"scale": 0.25} | changed
        return recent(**given, mask=CAUSAL, backend=None, statistics=statistics)

    asked = regard.trace if statistics else regard.attention
    for _ in range(3):
        asked(*(tensor() for _ in range(3)), mask=CAUSAL, scale=0.25)
    assert looked() is not None
    assert looked(**CHANGES[change]) is None
    assert looked() is not None


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("asked", ASKED)
def test_the_state_of_pytorch(asked: str, state: str, kinds: list[Any]) -> None:
    given = numbers()
    plain, *_ = (ASKED[asked](*given) for _ in range(3))
    before = len(kinds)
    with STATES[state]():
        ASKED[asked](*given)
    assert len(kinds) == before + 1
    assert torch.equal(ASKED[asked](*given), plain)
    assert len(kinds) == before + 1


@pytest.mark.compiled
@pytest.mark.parametrize("asked", ASKED)
def test_compiled_after_it_came_again(asked: str) -> None:
    def run(*given: Tensor) -> Tensor:
        return ASKED[asked](*given, mask=CAUSAL)

    for seed in range(3):
        run(*numbers(seed))
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for seed in range(2):
        torch.testing.assert_close(compiled(*numbers(seed)), run(*numbers(seed)))


@pytest.mark.parametrize("asked", ASKED)
def test_gradients_of_what_came_again_without(asked: str) -> None:
    for learns in (False, True) * 3:
        given = [t.requires_grad_(learns) for t in numbers()]
        out = ASKED[asked](*given, mask=CAUSAL)
        assert out.requires_grad == learns
        if learns:
            wide = [t.detach().double().requires_grad_() for t in given]
            expected = torch.autograd.grad(right(wide, mask=CAUSAL).sum(), wide)
            for mine, exact in zip(torch.autograd.grad(out.sum(), given), expected, strict=True):
                torch.testing.assert_close(mine, exact.float(), atol=1e-5, rtol=1e-5)
