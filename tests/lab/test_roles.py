"""Why queries, keys and values are three projections, at a reduced size."""

from __future__ import annotations

import pytest
import torch

from regard.lab import roles
from regard.lab.apparatus.experiments import Result, seeded


@pytest.fixture(scope="module")
def result() -> Result:
    return roles.run(steps=180, batch=32)


def test_static_attention_stays_at_chance(result: Result) -> None:
    found = result.numbers["measured"]["static"]
    assert found["right, beside"] == pytest.approx(0.5, abs=0.06)
    assert found["right, before"] == pytest.approx(0.5, abs=0.06)
    assert found["deciding word"] < 0.05


def test_one_projection_finds_a_word_but_cannot_look_back_from_all(result: Result) -> None:
    found = result.numbers["measured"]["one"]
    assert found["right, beside"] > 0.95
    assert 0.55 < found["right, before"] < 0.9
    assert found["itself"] > found["before"]


def test_three_projections_do_both(result: Result) -> None:
    found = result.numbers["measured"]["three"]
    assert found["right, beside"] > 0.97
    assert found["right, before"] > 0.9
    assert found["before"] > 0.45
    assert found["deciding word"] > 0.6


def test_only_three_projections_break_the_symmetry(result: Result) -> None:
    found = result.numbers["asymmetry"]
    assert found["static"] < 1e-5
    assert found["one"] < 1e-5
    assert found["three"] > 0.2


@pytest.mark.parametrize("kind", roles.KINDS)
def test_scores_are_those_that_attention_takes(kind: str) -> None:
    with seeded(0):
        model, words = roles.Reader(kind, 16), roles.before(3)[0]
        weights = model.look(words).weights()[:, 0]
    assert torch.allclose(model.scores(words).softmax(-1), weights, atol=1e-5)


def test_symmetry_of_sharp_scores_is_measured_too() -> None:
    with seeded(0):
        model, words = roles.Reader("one", 16), roles.before(1)[0]
        model.projections[0].weight.data *= 40
    assert (model.look(words).weights() == 0).any()
    assert roles.asymmetry(model.scores(words)[0]) < 1e-5


def test_tasks_are_as_described() -> None:
    with seeded(0):
        words, sense = roles.beside(50)
        chain, told = roles.before(50)
    for row, senses in zip(words.tolist(), sense.tolist(), strict=True):
        said = [roles.WORDS[word] for word in row]
        nouns = [word for word in said if word in roles.NOUNS]
        assert len(nouns) == 1
        cue = roles.NOUNS[nouns[0]][senses[said.index(nouns[0])]]
        assert [word for word in said if word in roles.NOUNS[nouns[0]]] == [cue]
        assert sum(s >= 0 for s in senses) == 1
    assert torch.equal(told[:, 1:], chain[:, :-1] % 2)
    assert (told[:, 0] == -1).all()
