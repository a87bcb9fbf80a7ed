"""Attention over pictures, sounds, graphs and memories, trained for seconds."""

from __future__ import annotations

import torch

from regard.lab import domains
from regard.lab.drawn_digits import SIDE, draw
from regard.lab.experiments import seeded
from regard.lab.karate_club import friendships
from regard.lab.played_letters import BINS, WORD, play


def test_digits_are_read_by_looking_at_ink() -> None:
    with seeded(0):
        found = domains.of_pictures(80, lambda: None)
    assert found["accuracy"] > 0.35
    assert found["on_ink"] > 1.3 * found["ink"]


def test_letters_are_written_by_looking_where_they_sound() -> None:
    with seeded(0):
        found = domains.of_sounds(90, lambda: None)
    assert found["accuracy"] > 0.4
    assert found["aligned"] > 1.8 * found["chance"]


def test_friends_tell_sides_and_strangers_are_not_seen() -> None:
    with seeded(0):
        found = domains.of_graphs(2, lambda: None)
    assert found["accuracy"]["friends"] > 0.85
    assert found["accuracy"]["everyone"] < 0.7
    assert found["outside"] == 0
    weights = torch.tensor(found["shown"])
    torch.testing.assert_close(weights.sum(1), torch.ones(34))
    assert bool((weights[friendships()] > 0).all())


def test_wide_keys_are_found_among_many_and_narrow_ones_are_not() -> None:
    with seeded(0):
        found = domains.of_memory(200, (4, 256), (4, 32))["recall"]
    assert found[32] == [1.0, 1.0]
    assert found[4][0] > 2 * found[4][1]


def test_questions_find_their_passages() -> None:
    found = domains.of_passages()
    assert found["right"] == [True] * len(domains.QUESTIONS)
    assert min(found["weight"]) > 0.5


def test_every_digit_is_drawn_inside_the_picture() -> None:
    with seeded(0):
        pictures, digits = draw(300)
    assert digits.bincount(minlength=10).min() > 10
    assert pictures.shape == (300, SIDE, SIDE)
    assert float(pictures.min()) >= 0
    assert float(pictures.max()) <= 1
    # Ink is a small part of the paper, and hardly touches its edge.
    inked = (pictures > 0.5).float()
    assert 0.04 < float(inked.mean()) < 0.25
    assert float(inked[:, 0].mean()) < 0.02


def test_a_letter_sounds_at_its_own_pitch() -> None:
    with seeded(0):
        spectra, lengths, word, which = play(8)
    assert spectra.shape[2] == BINS
    for i in range(8):
        assert which[i].max() == WORD - 1
        assert int((which[i] >= 0).sum()) == int(lengths[i])
        power = spectra[i].expm1().square()
        height = (power * torch.arange(BINS)).sum(1) / power.sum(1)
        first, last = (height[which[i] == at].mean() for at in (0, WORD - 1))
        assert (first < last) == (word[i, 0] < word[i, -1])


def test_a_result_that_is_not_supported_says_so() -> None:
    result = domains.run(steps=1, seeds=1, asked=20)
    assert not result.supported
    assert "digits are read" in result.verdict
    assert result.json()
