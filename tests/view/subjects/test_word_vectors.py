"""Words as vectors: the same everywhere, near when spelled alike."""

from __future__ import annotations

import pytest
import torch

from regard.view.subjects.word_vectors import WIDTH, trigrams, vectors, words
from tests.fresh_process import FreshProcesses


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        (" \t\n ", []),
        ("... -- !", []),
        ("It's (well-)known: “yes”.", ["It's", "well-)known", "yes"]),
        ("注意force です", ["注", "意", "force", "で", "す"]),
        ("so 🙂 happy", ["so", "🙂", "happy"]),
        ("\x1b[0m", ["0m"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_words_that_share_trigrams_point_the_same_way() -> None:
    x = vectors(["attends", "attention", "zebra", "Attends"]) / WIDTH**0.5
    like = x @ x.T
    shared = set(trigrams("attends")) & set(trigrams("attention"))
    assert shared == {"^at", "att", "tte", "ten"}
    torch.testing.assert_close(like[0, 1].item(), 4 / (7 * 9) ** 0.5, atol=1e-6, rtol=0)
    assert like[0, 2] == 0
    torch.testing.assert_close(like[0, 3].item(), 1.0, atol=1e-6, rtol=0)


def test_entries_have_a_mean_square_of_one() -> None:
    x = vectors(["a", "word", "incomprehensibilities"], width=64)
    torch.testing.assert_close(x.square().mean(-1), torch.ones(3))


def test_vectors_do_not_depend_on_the_salt_of_hash(fresh: FreshProcesses) -> None:
    other = fresh("""
from regard.view.subjects import vectors
print(hash("attention"), vectors(["attention"]).nonzero().tolist())
""")
    assert other.code == 0, other.err
    salted, _, found = other.out.partition(" ")
    assert int(salted) != hash("attention"), "this process has a salt of its own"
    assert found == f"{vectors(['attention']).nonzero().tolist()}\n"


def test_no_words_give_no_vectors() -> None:
    assert vectors([]).shape == (0, WIDTH)
