"""What word vectors know, after a few seconds of reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.lab import words
from regard.lab.experiments import Result, seeded


@pytest.fixture(scope="module")
def result() -> Result:
    return words.run(width=32, window=4, epochs=2, runs=1)


def test_words_of_a_kind_are_beside_each_other(result: Any) -> None:
    kin = result.numbers["kin"]
    assert kin["related"] > kin["chance"] + 0.3


def test_attention_moves_words_towards_their_sense(result: Any) -> None:
    senses = result.numbers["senses"]
    gained = [words._lean(one, "after") - words._lean(one, "before") for one in senses]
    assert len(gained) == 2 * len(words.SENSES)
    assert sum(g > 0 for g in gained) >= 6
    assert sum(gained) / len(gained) > 0.03
    for one in senses:
        assert one["weights"][one["word"]] == 0
        assert not set(one["sense"]) & set(one["sentence"].split())


def test_queen_is_nearer_by_the_sum_than_by_its_parts(result: Any) -> None:
    queen = result.numbers["analogies"][0]
    assert queen["asked"] == "man : king = woman : queen"
    assert queen["rank"] < 100
    assert queen["rank"] < queen["rank_alone"]


def test_the_verdict_is_that_of_the_ranks(result: Any) -> None:
    queens = result.numbers["queens"]
    assert queens == [result.numbers["analogies"][0]["rank"]]
    assert result.checks[1].holds == (queens == [1])
    assert result.json()


def test_ranks_leave_out_what_they_are_told_to() -> None:
    toy = words.Vectors(["a", "b", "c"], torch.tensor([[1.0, 0], [0.8, 0.6], [0, 1]]), 3)
    assert toy.nearest(toy["a"], 2) == ["a", "b"]
    assert toy.rank("b", toy["a"]) == 2
    assert toy.rank("b", toy["a"], without=["a"]) == 1
    assert toy.rank("c", toy["a"]) == 3


def test_pairs_lie_within_the_window_and_every_neighbour_is_one() -> None:
    with seeded(0):
        found = [
            pair for some in words._pairs(torch.arange(50), 3) for pair in zip(*some, strict=True)
        ]
    apart = [abs(int(a) - int(b)) for a, b in found]
    assert set(apart) == {1, 2, 3}
    # Neighbours side by side are always drawn, from both sides; farther ones less often.
    assert apart.count(1) == 2 * 49
    assert apart.count(1) > apart.count(2) > apart.count(3)


def test_words_and_arrows_are_drawn_at_their_places(result: Any) -> None:
    from regard.view.pictures.lab_picture import panel_picture

    panel = next(panel for panel in result.panels if panel.title == "Men and women")
    (axes,) = panel_picture(result, panel).axes
    drawn = {text.get_text(): text.xy for text in axes.texts if text.get_text()}
    assert set(drawn) == {word for pair in words.COUPLES for word in pair}
    assert drawn["queen"] == pytest.approx(result.numbers["plane"]["queen"])
    assert sum(not text.get_text() for text in axes.texts) == len(words.COUPLES)
