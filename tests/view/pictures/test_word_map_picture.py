"""Pictures of word maps: what they show, and where the rings are."""

from __future__ import annotations

import pytest
import torch

from regard import RegardError
from regard.interpret import Grounding

pytest.importorskip("matplotlib")

from regard.view import picture


def test_maps_are_shown_with_their_objects_and_the_picture() -> None:
    maps = torch.zeros(2, 1, 8, 12)
    maps[0] = 0.5
    maps[1, 0, [1, 6], [2, 9]] = torch.tensor([0.8, 0.6])
    found = Grounding(("three", "cats"), maps, (), ("a",), (0,), ("three", "cats"))
    figure = picture.word_maps(found, picture=torch.rand(3, 16, 24))
    painted, number, noun = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == [
        "picture",
        "three: 0",
        "cats: 2 of 3",
    ]
    assert torch.equal(torch.tensor(noun.images[0].get_array()), maps[1, 0])
    assert noun.collections[-1].get_offsets().tolist() == [[2, 1], [9, 6]]
    assert not len(number.collections[-1].get_offsets())
    assert painted.images[0].get_array().shape == (16, 24, 3)
    higher = picture.word_maps(found, "cats", threshold=0.9)
    assert higher.axes[0].get_title("left") == "cats: 1 of 3"


def test_a_film_has_a_row_of_frames() -> None:
    maps = torch.zeros(1, 11, 6, 6)
    for frame in range(11):
        maps[0, frame, 2, frame // 2] = 1
    found = Grounding(("cat",), maps, (), ("a",), (0,), ("one", "cat"))
    figure = picture.word_maps(found, dark=True)
    assert [axes.get_xlabel() for axes in figure.axes] == [f"frame {n}: 1" for n in range(0, 11, 2)]
    assert figure.axes[5].collections[-1].get_offsets().tolist() == [[5, 2]]
    with pytest.raises(RegardError, match="0 to 10"):
        picture.word_maps(found, frames=[11])
