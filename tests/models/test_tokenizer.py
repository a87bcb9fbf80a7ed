"""Text to ids and back: any text, and the same ids as the library that made the vocabulary."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import RegardError
from regard.models import Tokenizer
from regard.models.tokenizer import LETTERS, MARK, MARK_TEXT
from tests.models.tiny import tokenizer, tokenizer_file

library = pytest.importorskip("tokenizers")
SEEN = st.sampled_from(["the ", " cat", "mat.", "\n\n", "  ", "'s", "'ll", "1611", "é", MARK_TEXT])
ANY = st.text() | st.lists(SEEN | st.text(max_size=3)).map("".join)


@given(ANY)
def test_any_text_comes_back(text: str) -> None:
    ids = tokenizer().encode(text)
    assert MARK not in ids
    assert tokenizer().decode([MARK, *ids, MARK]) == text


@given(ANY)
def test_ids_are_those_of_the_library(text: str) -> None:
    made = library.Tokenizer.from_file(str(tokenizer_file()))
    assert tokenizer().encode(text) == made.encode(text).ids


def test_words_that_were_learned_are_one_piece() -> None:
    ids = tokenizer().encode("The cat sat")
    assert tokenizer().convert_ids_to_tokens(ids) == ["The", "Ġcat", "Ġsat"]
    assert tokenizer().pieces[MARK] == MARK_TEXT
    assert len(tokenizer()) == 320


def test_half_characters_are_shown_and_refused() -> None:
    first = tokenizer().encode("é")[0]
    assert tokenizer().decode([first]) == "\ufffd"
    with pytest.raises(
        RegardError, match="the text holds half of a surrogate pair, which is no character"
    ):
        tokenizer().encode("a\ud800")


def test_ids_that_no_token_has() -> None:
    with pytest.raises(RegardError, match=r"got:      320\n  accepted: 0 to 319"):
        tokenizer().decode([320])


@pytest.mark.parametrize("change", ["split", "model", "normalizer", "nothing", "broken"])
def test_other_tokenizers_are_refused(tmp_path: Path, change: str) -> None:
    about = json.loads(tokenizer_file().read_text())
    path = tmp_path / "tokenizer.json"
    if change == "split":
        about["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+"
    elif change == "model":
        del about["model"]["merges"]
    elif change == "normalizer":
        about["normalizer"] = {"type": "NFC"}
    if change != "nothing":
        path.write_text("{" if change == "broken" else json.dumps(about))
    with pytest.raises(RegardError, match="the tokenizer cannot be read"):
        Tokenizer.read(path)


def naive(of: Tokenizer, word: bytes) -> list[str]:
    """The oldest merge first, everywhere, until none is left: word for word."""
    parts = [LETTERS[byte] for byte in word]
    while known := [pair for pair in pairwise(parts) if pair in of._ranks]:
        left, right = min(known, key=of._ranks.__getitem__)
        joined: list[str] = []
        for part in parts:
            if joined and joined[-1] == left and part == right:
                joined[-1] = left + right
            else:
                joined.append(part)
        parts = joined
    return parts


@given(st.text("catdogshe", max_size=60))
def test_words_of_any_length_are_merged_by_the_rule(word: str) -> None:
    t = tokenizer()
    assert t.convert_ids_to_tokens(t._merged(word.encode())) == naive(t, word.encode())


def test_a_long_word_takes_no_longer_than_its_letters_and_is_not_remembered() -> None:
    t = Tokenizer.read(tokenizer_file())
    began = time.process_time()
    assert t.decode(t.encode("thecat" * 5000)) == "thecat" * 5000
    assert time.process_time() - began < 2.0
    assert t._known.cache_info().currsize == 0
