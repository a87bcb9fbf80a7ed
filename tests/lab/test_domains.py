"""Attention over pictures, sounds, graphs and memories, trained for seconds."""

from __future__ import annotations

import torch

from regard.lab import domains
from regard.lab.apparatus.experiments import seeded
from regard.lab.material.karate_club import friendships


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


def test_a_result_that_is_not_supported_says_so() -> None:
    result = domains.run(steps=1, models=1, asked=20)
    assert domains.run(steps=1, models=1, asked=20, seed=1).numbers != result.numbers
    assert not result.supported
    assert "digits are read" in result.verdict
    assert result.json()
