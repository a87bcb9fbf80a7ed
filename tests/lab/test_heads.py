"""Heads that look back grow, nothing replaces them, and several read better than one."""

from __future__ import annotations

from typing import Any

import pytest

from regard.lab import heads
from regard.lab.apparatus.experiments import seeded
from regard.lab.material.text import Corpus
from regard.lab.reports.heads import strongest


@pytest.fixture(scope="module")
def grown() -> tuple[heads.Reader, heads.Windows, list[dict[str, Any]]]:
    """Two heads a layer, on nothing but repetition, which is learned in seconds."""
    with seeded(0):
        data = heads.Windows(Corpus.words(32), length=16, batch=48, repeats=1.0)
        model = heads.Reader(32, 64, 2, 2)
        return model, data, heads.train(model, data, 450, lambda: None, looks=1, rate=4e-3)


def test_a_previous_token_head_and_an_induction_head_grow(grown: Any) -> None:
    first, last = grown[2][0], grown[2][-1]
    assert strongest(first, "previous", 0)[1] < 0.2
    assert strongest(first, "induction", 1)[1] < 0.2
    assert strongest(last, "previous", 0)[1] > 0.4
    assert strongest(last, "induction", 1)[1] > 0.5
    assert first["again_accuracy"] < 0.1
    assert last["again_accuracy"] > 0.8


def test_without_either_kind_nothing_said_again_is_foreseen(grown: Any) -> None:
    model, data, history = grown
    found = heads.silence_each(model, data)
    whole = history[-1]["again_accuracy"]
    for kind in ("previous", "induction"):
        assert found["kinds"][kind]["heads"]
        for by in ("zero", "mean"):
            assert found["kinds"][kind][by]["foreseen"] < 0.5 * whole
    # Silence ends where it should.
    assert heads.measure(model, data)["again_accuracy"] == found["whole"]["again_accuracy"]


def test_eight_heads_read_better_than_one_of_equal_parameters() -> None:
    loss, sizes = {}, set()
    for count in (1, 8):
        with seeded(0):
            data = heads.Windows(Corpus.words(64), length=24, batch=32, repeats=0.5)
            model = heads.Reader(64, 64, count, 2)
            last = heads.train(model, data, 120, lambda: None, looks=1, rate=4e-3)[-1]
            loss[count] = last["text_loss"]
            sizes.add(sum(p.numel() for p in model.parameters()))
    assert len(sizes) == 1
    assert loss[8] < loss[1] - 0.03


def test_a_result_without_grown_heads_is_not_supported() -> None:
    result = heads.run(steps=2, width=16, heads=2, vocabulary=32, length=16, batch=8, seeds=2)
    assert [check.holds for check in result.checks[:5]] == [False] * 5
    assert len(result.numbers["seeds"]) == 2
    assert "too little to copy" in result.answer
    assert result.json()
