"""The tokens that a watched model reads, and the addresses of traces."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import regard
from regard import RegardError
from regard.models import load
from regard.seen import Address
from regard.watching.tokens import Reading, spelled
from tests.watching.huggingface.test_huggingface import N, build, inputs, padded, tokens
from tests.watching.test_watch import X, model


class Letters:
    """A tokenizer of the smallest kind: id 3 is "a"."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(94 + i) for i in ids)


LETTERS = Letters()


def letters(ids: Tensor) -> list[Any]:
    rows = [[LETTERS.decode([i]) for i in row] for row in ids.tolist()]
    return rows[0] if len(rows) == 1 else rows


def generate(m: Any, ids: Tensor, **how: Any) -> Tensor:
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return m.generate(ids, **options | how)


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_are_those_the_model_was_given(batch: int, tmp_path: Path) -> None:
    m, ids = build("llama"), tokens(batch)
    with torch.no_grad(), regard.watch(m, tokenizer=LETTERS) as seen:
        m(ids)
    assert seen.tokens == letters(ids)
    seen.save(tmp_path / "run.regard")
    with regard.load(tmp_path / "run.regard") as again:
        assert again.tokens == letters(ids)
    with torch.no_grad(), regard.watch(m, tokenizer=LETTERS) as seen:
        m(input_ids=ids)
    assert seen.tokens == letters(ids)


@pytest.mark.parametrize("how", ["dynamic", "static", "uncached", "beams", "padded"])
def test_generating_adds_a_token_a_step(how: str) -> None:
    m, ids = build("llama"), tokens(2)
    options: dict[str, Any] = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "uncached": {"use_cache": False},
        "beams": {"num_beams": 2},
        "padded": {"attention_mask": padded(N, 6, left=True)},
    }[how]
    with regard.watch(m, tokenizer=LETTERS, keep="traces") as seen:
        out = generate(m, ids, **options)
    layer = seen["model.layers.1.self_attn"]
    assert layer.steps == [0, 1, 2, 3]
    assert layer.addresses[2] == Address("model.layers.1.self_attn", 2, 2, 2)
    assert seen.tokens is not None
    if how == "beams":
        assert [len(row) for row in seen.tokens] == [N + 3] * 4
        for row, chosen in zip(seen.tokens[::2], out.tolist(), strict=True):
            assert row[:N] == [LETTERS.decode([i]) for i in chosen[:N]]
    else:
        # The last token was written, and never read.
        assert seen.tokens == letters(out[:, :-1])


def test_beams_that_change_places_keep_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    m, given = build("llama"), []
    own = m.prepare_inputs_for_generation

    def prepare(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(input_ids.clone())
        return own(input_ids, *args, **kwargs)

    monkeypatch.setattr(m, "prepare_inputs_for_generation", prepare)
    with regard.watch(m, tokenizer=LETTERS) as seen:
        generate(m, tokens(2), num_beams=4, max_new_tokens=8)
    assert any(
        not torch.equal(after[:, : before.shape[1]], before)
        for before, after in itertools.pairwise(given)
    ), "the beams of this test change places"
    assert seen.tokens == letters(given[-1])
    assert m.prepare_inputs_for_generation is prepare


def test_a_second_text_begins_again() -> None:
    m = build("llama")
    with regard.watch(m, tokenizer=LETTERS, keep="traces") as seen:
        generate(m, tokens(1))
        assert seen.tokens is not None
        generate(m, tokens(1, seed=5))
        assert seen.tokens is None, "two texts have no one list of tokens"
        assert seen["model.layers.0.self_attn"].steps == [0, 1, 2, 3] * 2
        assert seen["model.layers.0.self_attn"].runs == list(range(8))
        seen.clear()
        out = generate(m, tokens(1, seed=5))
        assert seen.tokens == letters(out[:, :-1])


def test_decoding_by_hand_with_a_cache() -> None:
    m, ids = build("gpt2"), tokens(1)
    with torch.no_grad(), regard.watch(m, tokenizer=LETTERS, keep="traces") as seen:
        first = m(ids[:, :5], use_cache=True)
        m(ids[:, 5:], past_key_values=first.past_key_values)
    assert seen.tokens == letters(ids)
    assert next(iter(seen.values())).steps == [0, 1]


@torch.no_grad()
def test_a_text_that_parts_in_two_is_no_one_text() -> None:
    """Both go on with what they share, each with its own cache; one that is cut is one text."""
    m, ids = build("llama"), tokens(1)
    cache = DynamicCache(config=m.config)
    with regard.watch(m, tokenizer=LETTERS) as seen:
        m(ids[:, :4], past_key_values=cache)
        other = copy.deepcopy(cache)
        m(ids[:, 4:6], past_key_values=cache)
        assert seen.tokens == letters(ids[:, :6])
        cache.crop(-1)
        m(ids[:, :1], past_key_values=cache)
        assert seen.tokens == letters(torch.cat([ids[:, :5], ids[:, :1]], 1))
        m(ids[:, 5:6], past_key_values=other)
        assert seen.tokens is None


def test_a_cache_that_was_filled_unseen_leaves_tokens_unknown() -> None:
    m, ids = build("gpt2"), tokens(1)
    with torch.no_grad():
        first = m(ids[:, :5], use_cache=True)
        with regard.watch(m, tokenizer=LETTERS) as seen:
            m(ids[:, 5:], past_key_values=first.past_key_values)
    assert seen.tokens is None


def test_addresses_come_back_from_a_file(tmp_path: Path) -> None:
    m = build("albert", num_hidden_layers=3)
    with torch.no_grad(), regard.watch(m, keep="traces", every=2) as seen:
        for _ in range(3):
            m(**inputs(m, "albert"))
    seen.save(tmp_path / "run.regard")
    (path,) = seen
    # One module that runs three times in a run, of which every second is looked at.
    want = [Address(path, call, run, 0) for call, run in enumerate([0, 0, 0, 2, 2, 2])]
    assert seen[path].addresses == want
    with regard.load(tmp_path / "run.regard") as again:
        assert again[path].addresses == want


def test_models_that_read_no_tokens() -> None:
    m = model()
    with torch.no_grad(), regard.watch(m, tokenizer=LETTERS) as seen:
        m(X)
    assert seen.tokens is None


def test_generate_is_left_as_it_was() -> None:
    m = build("llama")
    before = dict(vars(m))
    with regard.watch(m, tokenizer=LETTERS):
        assert vars(m).keys() != before.keys()
        generate(m, tokens(1))
    assert vars(m).keys() == before.keys()
    with pytest.raises(KeyError), regard.watch(m, tokenizer=LETTERS):
        raise KeyError
    assert vars(m).keys() == before.keys()


def test_texts_of_tokens() -> None:
    class Bytes:
        """As byte-level vocabularies are: spaces are marks, characters may be cut."""

        words = ("The", "Ġcat", "▁sat", "Ã", "")

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.words[i] for i in ids]

        def decode(self, ids: list[int]) -> str:
            return ["The", " cat", "sat", "\ufffd", ""][ids[0]]

    assert spelled(Bytes(), [0, 1, 2, 3, 4, 1]) == ["The", " cat", " sat", "Ã", "", " cat"]


def test_a_character_of_several_tokens_stands_at_the_last() -> None:
    reader = load("regard-small", device="cpu")
    assert reader.read("«a» 日!") == ["<text>", *"⋯«", "a", *"⋯»", " ", *"⋯⋯日", "!"]
    # What is no character at all is shown as the vocabulary has it.
    assert reader.read("\ufffd")[1:] == ["ï", "¿", "½"]


def test_tokenizers_and_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RegardError, match=r"got:      dict\n.*decode\(ids\)"):
        regard.watch(nn.Linear(2, 2), tokenizer={"a": 3})
    with pytest.raises(RegardError, match="reads one and writes another"):
        regard.watch(build("t5"), tokenizer=LETTERS)
    assert Reading().tokens() is None
