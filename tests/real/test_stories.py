"""A trained Llama: the same story while watched, told best from what it looks at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import Trace, interpret, masks
from regard.seen import Seen
from tests.real.agreement import agree
from tests.real.stories import pieces, stories

pytest.importorskip("transformers")
pytestmark = pytest.mark.real
READ, TOLD, KEPT = 180, 230, 60


@pytest.fixture(scope="module")
def model() -> Any:
    return stories()


@pytest.fixture(scope="module")
def story(model: Any) -> Tensor:
    return tell(model)


def tell(model: Any, tokens: int = TOLD) -> Tensor:
    told: Tensor = model.generate(
        torch.tensor([[1]]), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    return told


def test_the_story_is_the_same_while_watched(model: Any, story: Tensor) -> None:
    words = pieces()
    text = "".join(words[i] for i in story[0].tolist())
    assert "Once upon a time, there was a little girl named Lily." in text
    with regard.watch(model) as seen:
        assert torch.equal(tell(model, 60), story[:, :61])
    assert all(layer.calls == 60 for layer in seen.values())


@torch.no_grad()
def test_weights_and_logits_are_those_of_eager_attention(model: Any, story: Tensor) -> None:
    want = model(story, output_attentions=True)
    with regard.watch(model, keep="traces") as seen:
        got = model(story)
    exact = copy.deepcopy(model).double()(story, output_attentions=True)
    agree(got.logits, want.logits, exact.logits)
    assert len(seen) == len(want.attentions) == 6
    for i, layer in enumerate(seen.values()):
        agree(layer.trace.weights(), want.attentions[i], exact.attentions[i])
        assert layer.trace.mask == masks.causal()


@pytest.mark.parametrize("word", [" ball", " stick"])
@torch.no_grad()
def test_a_word_cites_where_it_was_said_before(model: Any, story: Tensor, word: str) -> None:
    words, begun = pieces(), 100
    told = [words[i] for i in story[0].tolist()]
    with regard.watch(model, keep="traces") as seen:
        model(story)
    places = [range(i, i + 1) for i in range(1, begun)]
    shares = interpret.citations(seen, places, prompt=begun, tokens=len(told) - begun).shares
    said = [i for i in range(begun - 1) if told[1 + i] == word]
    again = torch.tensor([token == word for token in told[begun:]])
    assert said
    assert again.sum() > 2
    drawn = shares[:, said].sum(1)
    assert drawn[again].mean() > 3 * drawn[~again].mean()
    first = shares[again].argmax(1).tolist()
    assert sum(place in said for place in first) > len(first) / 2


@torch.no_grad()
def test_heavy_hitters_carry_the_story_better_than_other_keys(model: Any, story: Tensor) -> None:
    with regard.watch(model, keep="traces") as seen:
        cache = model(story[:, :READ]).past_key_values
    generator = torch.Generator().manual_seed(0)

    def some(trace: Trace) -> Tensor:
        drawn = [torch.randperm(READ - 16, generator=generator)[: KEPT - 16] for _ in range(6)]
        return torch.cat([torch.stack(drawn), torch.arange(READ - 16, READ).expand(6, -1)], 1)[None]

    def loss(which: Callable[[Trace], Tensor]) -> float:
        return surprise(model, story, seen, cache, which)

    heavy = loss(lambda t: interpret.heavy_hitters(t, KEPT, recent=16).keep)
    last = loss(lambda t: torch.arange(READ - KEPT, READ).expand(1, 6, -1))
    everything = loss(lambda t: torch.arange(READ).expand(1, 6, -1))
    drawn = sum(loss(some) for _ in range(5)) / 5
    assert everything < heavy < min(last, drawn)


def surprise(
    model: Any, story: Tensor, seen: Seen, cache: Any, which: Callable[[Trace], Tensor]
) -> float:
    """How badly the rest of the story is foretold when only some keys are left."""
    cache = copy.deepcopy(cache)
    for kept, layer in zip(cache.layers, seen.values(), strict=True):
        keep = which(layer.trace)[..., None].expand(-1, -1, -1, kept.keys.shape[-1])
        kept.keys, kept.values = kept.keys.gather(2, keep), kept.values.gather(2, keep)
    rest = torch.arange(READ, story.shape[1] - 1)
    logits = model(story[:, rest], past_key_values=cache, position_ids=rest[None]).logits
    return float(torch.nn.functional.cross_entropy(logits[0], story[0, rest + 1]))
