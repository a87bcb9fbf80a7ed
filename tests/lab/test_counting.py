"""Counting in maps and pictures, at a reduced size: what is measured is what is there."""

from __future__ import annotations

import math

import pytest
import torch

from regard.lab import counting
from regard.lab.apparatus.experiments import Result, seeded
from regard.lab.models import painter


@pytest.fixture(scope="module")
def result() -> Result:
    return counting.run(steps=20, width=8, layers=2, batch=8, pictures=48)


def test_pictures_hold_as_many_things_as_their_prompts_say() -> None:
    with seeded(0):
        words, pictures = painter.draw(200)
    assert torch.equal(counting.in_picture(pictures), words[:, 0] + 1)
    noise = 0.15 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    near = counting.in_picture(pictures + noise.clamp(-0.4, 0.4))
    assert torch.equal(near, words[:, 0] + 1)


def test_what_is_planted_in_maps_is_found_and_what_is_not_is_chance() -> None:
    """Maps of the finished picture from the fourth step on, noise before it."""
    with seeded(0):
        words, wished = painter.draw(120)
        number = torch.randint(6, (120,))
        asked = words.clone()
        asked[:, 0] = number
        steps = painter.STROKES
        maps = torch.rand(4, 120, steps, 2, painter.SIDE**2)
        ink = (wished.abs().amax(-1) > 0.5).float()
        maps[2, :, 3:, 1] = ink[:, None] + 0.1 * torch.rand(120, steps - 3, painter.SIDE**2)
        noisy = torch.randn(steps, *wished.shape)
        found = painter.Painted(asked, maps, noisy, wished.expand(steps, -1, -1, -1), wished)
        numbers = counting.measured(found)
    correlation, foreseen = numbers["correlation"], numbers["foreseen"]
    assert numbers["chosen"]["noun"]["layers"] == [1]
    assert correlation["noun"][3:] == pytest.approx([1.0] * (steps - 3))
    assert correlation["guess"] == pytest.approx([1.0] * steps)
    for name in ("another picture", "number", "stop", "noisy picture"):
        assert abs(sum(correlation[name]) / steps) < 0.3
        assert sum(foreseen[name]) / steps < 0.4
    assert foreseen["noun"][3:] == [1.0] * (steps - 3)
    assert foreseen["noun"][0] < 0.4
    assert numbers["on_things"][3] == 1
    assert numbers["by_noun"]["crosses"] == {"on_things": 1, "foreseen": 1}
    assert numbers["right"] == pytest.approx(float((number == words[:, 0])[60:].float().mean()))


def test_the_number_asked_for_gives_nothing_away() -> None:
    asked = torch.tensor([1, 1, 2, 2, 3, 3])
    assert counting.within(asked, asked, asked) == 0
    final = torch.tensor([1, 2, 2, 3, 3, 4])
    assert counting.within(final, final, asked) == pytest.approx(1)
    assert counting.foreseen(asked, final, asked) == 0
    assert counting.foreseen(final, final, asked) == 1
    assert math.isnan(counting.foreseen(asked, asked, asked))


def test_a_short_training_is_reported_whole(result: Result) -> None:
    assert result.numbers["tested"] == 24
    assert all(len(each) == painter.STROKES for each in result.numbers["correlation"].values())
    assert len(result.checks) == 4
    assert len(result.panels) == 5
    assert '"experiment": "counting"' in result.json()
    assert all(check.found for check in result.checks)


def test_the_noun_is_held_against_words_that_do_not_say_how_things_look() -> None:
    """With some seeds the colour's map foresees more than the noun's."""
    names = ("number", "colour", "noun", "stop", "noisy picture", "guess", "another picture")
    flat = dict.fromkeys(names, [0.1] * painter.STROKES)
    high = {"noun": [0.4] * painter.STROKES, "colour": [0.7] * painter.STROKES}
    numbers = {"correlation": flat | high, "foreseen": flat | high, "on_things": [0.8] * 20}
    checks = counting._checks(numbers)
    assert all(check.holds for check in checks)
    assert "the colour's 70%" in checks[-1].found
    numbers["foreseen"]["stop"] = high["colour"]
    assert [check.holds for check in counting._checks(numbers)] == [True, True, True, False]
