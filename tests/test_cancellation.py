"""Long work ends at its next step once it is no longer wanted, wherever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import regard
from regard import masks
from regard.backends.tiled import forward, pieces
from regard.cancellation import stoppable, telling
from regard.view.atlas import on_cores
from regard.view.subjects import vectors
from tests.models.tiny import tokenizer

X = torch.zeros(1, 1, 700, 4)
LONG = "thecatsat" * 3000


class Unwanted:
    """Steps, of which so many are let pass."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TimeoutError


def traced() -> object:
    return regard.trace(X, X, X, backend="tiled", mask=masks.causal())


@pytest.mark.parametrize(
    ("work", "steps"),
    [
        (traced, 2),
        (lambda: regard.trace(X, X, X, backend="tiled", mask=~masks.window(0)), 2),
        (lambda: tokenizer().encode(LONG), 100),
        (lambda: vectors([LONG, LONG]), 2),
        (lambda: vectors(["a"] * 10), 5),
        (lambda: list(on_cores(lambda _: traced(), range(2))), 2),
    ],
    ids=["causal", "not a band", "tokens", "letters", "words", "on cores"],
)
def test_work_ends_at_its_next_step(
    work: Callable[[], object], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LOT", 1)
    check = Unwanted(steps)
    with stoppable(check), pytest.raises(TimeoutError):
        work()
    work()


@pytest.mark.parametrize("loop", [True, False], ids=["compiled", "uncompiled"])
def test_attention_tells_how_far_it_is(
    loop: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LOT", 1)
    if not loop:
        request.getfixturevalue("uncompiled")
    far: list[float] = []
    with telling(lambda done, total: far.append(done / total)):
        traced()
    assert far[0] == 0
    assert len(far) > 4
    assert far == sorted(far)
    assert 0.7 < far[-1] < 1


def test_attention_and_questions_end_without_the_compiled_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "fusing", lambda x: None)
    with stoppable(Unwanted(2)), pytest.raises(TimeoutError):
        traced()
    t = regard.trace(X, X, X, backend="tiled")
    with stoppable(Unwanted(2)), pytest.raises(TimeoutError):
        t.top(2)
