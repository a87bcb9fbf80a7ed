"""What is kept of an answer, and given for other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from regard.backends.triton.questions import answers
from regard.backends.triton.questions.answers import Answers
from tests.torch_settings import deterministic

WHICH: Any = object()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Tensor | None]]:
    """The tensors of each launch that is made again."""
    found: list[Sequence[Tensor | None]] = []

    def note(steps: list[Any], tensors: Sequence[Tensor | None]) -> None:
        assert steps == [WHICH]
        found.append(tensors)

    monkeypatch.setattr(answers, "recorded", lambda: nullcontext([]))
    monkeypatch.setattr(answers, "steps_of", lambda launches, given, memory: [WHICH])
    monkeypatch.setattr(answers, "launch_again", note)
    return found


def test_launches_are_made_again_with_fresh_memory(launched: list[Sequence[Tensor]]) -> None:
    def run(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert q is not k
        return torch.ones(2, 3), torch.full((5,), 7)

    known, t = Answers(), torch.randn(4)
    assert known.given("kind", (t, t)) is None
    first = known.first("kind", run, (t, t), zero=(1,))
    assert not launched
    for _ in range(2):
        others = torch.randn(4), torch.randn(4)
        # PyTorch then fills memory with what is not 0.
        with deterministic():
            memory = known.given("kind", others)
        assert memory is not None
        assert known.given("another", others) is None
        assert all(a is b for a, b in zip(launched.pop(), (*others, *memory), strict=True))
        assert [t.shape for t in memory] == [t.shape for t in first]
        assert [t.dtype for t in memory] == [t.dtype for t in first]
        assert memory[0].data_ptr() != first[0].data_ptr()
        assert not memory[1].any()
    assert not launched


def test_without_a_kind_nothing_is_kept(launched: list[Sequence[Tensor]]) -> None:
    known, t = Answers(), torch.randn(4)
    (found,) = known.first(None, lambda t: (t + 1,), (t,))
    assert torch.equal(found, t + 1)
    assert known.given(None, (t,)) is None
