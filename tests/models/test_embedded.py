"""The models that come with the package: they read and write, and their heads do what is said."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import models
from regard.models import OwnReader, OwnTranslator
from regard.models.named_models import own_place

pytest.importorskip("tokenizers")

STORY = "Once upon a time, there was a little girl named Lily. Lily had a big red ball."


@pytest.fixture(scope="module")
def small() -> OwnReader:
    reader = models.load("regard-small", device="cpu")
    assert isinstance(reader, OwnReader)
    return reader


def test_they_are_small_and_say_where_they_are_from(small: OwnReader) -> None:
    for name, room in (("regard-small", 15e6), ("regard-king-james", 8e6)):
        assert (own_place(name) / "model.safetensors").stat().st_size < room
    for fact in ("data", "training", "loss", "licence", "heads", "badges"):
        assert fact in small.card


def test_the_story_teller_knows_what_comes_next(small: OwnReader) -> None:
    ids = small.ids(STORY)
    with torch.no_grad():
        logits = small.model(ids)[0, :-1].log_softmax(-1)
    loss = -logits.gather(-1, ids[0, 1:, None]).mean()
    # By chance it would be the logarithm of the vocabulary, above 8.
    assert loss < 2.5
    assert small.generate("Once upon a time, there was a", 1, temperature=0).strip() == "little"


def test_the_induction_head_of_the_card_looks_behind_the_last_time(small: OwnReader) -> None:
    """Random tokens said twice: from each of the second half, to what followed it in the first."""
    best = small.card["heads"]["induction"][0]
    said = torch.randint(300, 4000, (1, 40), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([torch.zeros(1, 1, dtype=torch.int64), said, said], 1)
    with torch.no_grad(), regard.watch(small.model, keep="traces") as seen:
        small.model(ids)
    weights = list(seen.values())[best["layer"]].trace.weights()[0, best["head"]]
    rows = torch.arange(41, 80)
    assert weights[rows, rows - 39].mean() > 0.4


def test_the_translator_writes_as_the_older_bible() -> None:
    reader = models.load("regard-king-james", device="cpu")
    assert isinstance(reader, OwnTranslator)
    said = reader.generate("You shall love your neighbor as yourself.", 20, temperature=0)
    assert said.strip() == "Thou shalt love thy neighbour as thyself."
    # Quotation marks as phones write them are read as those of what was learned.
    straight, curly = 'He said, "I don\'t know."', "He said, “I don’t know.”"
    assert reader.read(curly) == reader.read(straight)
    assert reader.generate(curly) == reader.generate(straight)
