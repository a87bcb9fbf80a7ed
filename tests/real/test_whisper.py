"""Whisper tiny.en hears A Tale of Two Cities: words, weights, and when each word was said."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard import interpret
from regard.seen import Seen
from tests.real.agreement import agree
from tests.real.whisper import features, speech, tiny_en, tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.real

SECONDS, PROMPT, END = 15, 2, 50_256
SAID = (
    "It was the best of times, it was the worst of times. It was the age of wisdom, it was the "
    "age of foolishness. It was the epoch of belief, it was the epoch of incredulity. It was the "
    "season of light,"
)


class Heard(NamedTuple):
    model: Any
    sound: Tensor
    features: Tensor
    ids: list[int]
    texts: list[str]
    seen: Seen
    """While generating."""


@pytest.fixture(scope="module")
def heard() -> Heard:
    model, sound, read = tiny_en(), speech(SECONDS), tokenizer()
    given = features(sound)
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        written = model.generate(given, do_sample=False)[0].tolist()
    ids = [i for i in written if i < END]
    return Heard(model, sound, given, ids, [read.decode([i]) for i in ids], seen)


def as_read(heard: Heard) -> dict[str, Tensor]:
    ids = torch.tensor([[50_257, 50_362, *heard.ids, END]])
    return {"input_features": heard.features, "decoder_input_ids": ids}


@torch.no_grad()
def test_the_same_words_are_heard_while_watched(heard: Heard) -> None:
    assert "".join(heard.texts).strip() == SAID
    plain = heard.model.generate(heard.features, do_sample=False)[0].tolist()
    assert [i for i in plain if i < END] == heard.ids


@torch.no_grad()
def test_weights_and_logits_are_those_of_eager_attention(heard: Heard) -> None:
    given = as_read(heard)
    want = heard.model(**given, output_attentions=True)
    with regard.watch(heard.model, keep="traces") as seen:
        got = heard.model(**given)
    given["input_features"] = given["input_features"].double()
    exact = copy.deepcopy(heard.model).double()(**given, output_attentions=True)
    agree(got.logits, want.logits, exact.logits)
    kinds = {
        "encoder.layers.{}.self_attn": "encoder_attentions",
        "decoder.layers.{}.self_attn": "decoder_attentions",
        "decoder.layers.{}.encoder_attn": "cross_attentions",
    }
    for path, kind in kinds.items():
        for i in range(4):
            weights = seen[f"model.{path.format(i)}"].trace.weights()
            agree(weights, want[kind][i], exact[kind][i])


@torch.no_grad()
def test_times_are_those_of_transformers(heard: Heard) -> None:
    given, heads = as_read(heard), heard.model.generation_config.alignment_heads
    eager = heard.model(**given, output_attentions=True)
    rows = [weights[:, :, : PROMPT + len(heard.ids)] for weights in eager.cross_attentions]
    want = heard.model._extract_token_timestamps(
        transformers.generation.GenerateEncoderDecoderOutput(
            sequences=given["decoder_input_ids"], cross_attentions=(rows,)
        ),
        heads,
        num_frames=100 * SECONDS,
        num_input_ids=PROMPT - 1,
    )[0, PROMPT - 1 :]
    got = interpret.token_times(heard.seen, len(heard.ids), heads, frames=50 * SECONDS)
    torch.testing.assert_close(got[:, 0].float(), want[: len(got)], atol=1e-4, rtol=0)


def test_words_end_and_begin_where_the_sound_does(heard: Heard) -> None:
    heads = heard.model.generation_config.alignment_heads
    words = interpret.word_times(heard.seen, heard.texts, heads, frames=50 * SECONDS)
    assert [word.text for word in words] == SAID.split()
    assert all(word.start <= word.end for word in words)
    assert all(a.end <= b.start for a, b in pairwise(words))
    assert words[-1].end <= SECONDS
    # What no weight was asked about: how loud it was.
    stops = pauses(heard.sound)
    assert len(stops) == 5
    for quiet, loud in stops:
        before = min(words, key=lambda word: abs(word.end - quiet))
        after = words[words.index(before) + 1]
        assert before.text[-1] in ",."
        assert abs(before.end - quiet) < 0.2
        assert abs(after.start - loud) < 0.2


def pauses(sound: Tensor) -> list[tuple[float, float]]:
    """Where it is quiet for 0.3 s and more, between the first word and the last."""
    loudness = 10 * sound.view(-1, 320).square().mean(1).log10()
    loud = (loudness > loudness.max() - 25).nonzero()[:, 0].tolist()
    return [(0.02 * (a + 1), 0.02 * b) for a, b in pairwise(loud) if b - a > 15 and 0.02 * a > 1.0]
