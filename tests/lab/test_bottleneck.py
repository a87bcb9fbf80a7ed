"""What attention was invented for, at a reduced size."""

from __future__ import annotations

from statistics import mean

import pytest
import torch

from regard import RegardError
from regard.lab import bottleneck
from regard.lab.apparatus.experiments import seeded
from regard.lab.material.sayings import START, Book, misses, sayings
from regard.lab.models.translators import translator


def done() -> None:
    """Nobody is told of steps."""


def test_length_costs_one_vector_more_than_attention() -> None:
    copy, right = bottleneck.TASKS["copy"], {}
    for name in ("gru", "gru + dot"):
        with seeded(0):
            model = translator(name, bottleneck.SYMBOLS, bottleneck.SYMBOLS + 1, 32)
            batches = bottleneck.symbols(copy, (2, 8))
            bottleneck.train(model, batches, bottleneck.SYMBOLS, 150, done)
            right[name] = [bottleneck.correct(model, copy, n) for n in (2, 8)]
    assert min(short for short, _ in right.values()) > 0.85
    assert right["gru"][1] < 0.45
    assert right["gru + dot"][1] > right["gru"][1] + 0.2


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("rnn", 0, 1e-6), ("lstm", 0, 1e-4), ("gru", 0, 1e-4), ("gru + additive", 0.05, 1),
     ("gru + dot", 0.05, 1), ("transformer", 0.05, 1)],
)  # fmt: skip
def test_word_1_does_not_reach_through_one_vector(name: str, least: float, most: float) -> None:
    with seeded(0):
        model = translator(name, bottleneck.SYMBOLS, bottleneck.SYMBOLS + 1, 64)
        near, far = (bottleneck.reach(model, bottleneck.TASKS["reverse"], n) for n in (2, 14))
    assert least <= far["first"] / near["first"] <= most


def test_attention_translates_better() -> None:
    book, scores = Book.read(1500), {}
    for name in ("gru", "gru + dot"):
        with seeded(0):
            model = translator(name, len(book.sources), len(book.targets), 48)
            bottleneck.train(model, book.batches(48), START, 200, done)
            scores[name] = mean(bottleneck.translation(model, book).values())
    assert scores["gru + dot"] > scores["gru"] + 0.06


def test_where_a_model_looks_is_shown_word_by_word() -> None:
    book = Book.read(200)
    with seeded(0):
        models = {name: translator(name, len(book.sources), len(book.targets), 8)
                  for name in ("gru + additive", "transformer")}  # fmt: skip
        sentence = bottleneck.example(models, book)
    for weights in map(torch.tensor, sentence["weights"].values()):
        assert weights.shape == (len(sentence["older"]), len(sentence["newer"]))
        assert torch.allclose(weights.sum(1), torch.ones(len(weights)))


@pytest.mark.parametrize("name", ["rnn", "lstm + additive", "gru + dot", "transformer"])
def test_no_model_sees_what_it_is_to_write(name: str) -> None:
    with seeded(0):
        model = translator(name, 9, 9, 8)
        source, before = model.source(torch.randint(9, (2, 5))), torch.randint(9, (2, 4))
    other = before.clone()
    other[:, 3] = (other[:, 3] + 1) % 9
    a, b = model(source, before), model(source, other)
    assert torch.allclose(a[:, :3], b[:, :3], atol=1e-6)
    assert not torch.allclose(a[:, 3], b[:, 3], atol=1e-3)


def test_models_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(
        RegardError, match=r"some through one vector and some with attention\n.*gru"
    ):
        bottleneck.run(models=("gru",))
    with pytest.raises(RegardError, match=r"no model of that name\n  got: +'gru \+ magic'"):
        bottleneck.run(models=("rnn", "gru + magic"), steps=0, translating=0, sayings=100)


def test_every_source_word_counts_in_every_output() -> None:
    with seeded(0):
        model = translator("gru + additive", 9, 9, 8)
        source = model.source(torch.randint(9, (1, 5))).detach().requires_grad_()
        model(source, torch.randint(9, (1, 4)))[:, -1].sum().backward()
    assert source.grad is not None
    assert (source.grad.abs().sum(-1) > 0).all()


def test_sayings_held_out_are_not_learned_from() -> None:
    book = Book.read(4500)
    assert len(sayings()) == 4500
    assert len(book.held) == 450
    assert not {newer for newer, _ in book.held} & {newer for newer, _ in book.learned}
    assert all(3 <= len(side) <= 12 for pair in sayings() for side in pair)


def test_batches_are_of_one_length_and_end() -> None:
    with seeded(0):
        source, target = next(Book.read(200).batches(16))
    assert source.shape[0] == 16
    for row in target.tolist():
        said = [word for word in row if word >= 0]
        assert said[-1] == 1
        assert 1 not in said[:-1]


def test_misses_counts_the_fewest_changes() -> None:
    assert misses([], ["a", "b"]) == 2
    assert misses(["a", "b"], ["a", "b"]) == 0
    assert misses(["b", "a", "c"], ["a", "c"]) == 1
