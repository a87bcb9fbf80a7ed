"""Words as vectors, by their spelling alone: nothing is learned."""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cancellation import step

WIDTH = 1024
MANY = 10_000
"""Trigrams of one word after which it is asked whether they are still wanted."""

# Chinese and Japanese are written without spaces: each of their characters stands for itself.
UNSPACED = re.compile("([\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")


def words(text: str) -> list[str]:
    """The words of a text, without the punctuation around them.

    >>> words("Who's there? - A well-read reader.")
    ["Who's", 'there', 'A', 'well-read', 'reader']
    >>> words("注意 works")
    ['注', '意', 'works']
    """
    found = []
    for piece in UNSPACED.sub(r" \1 ", text).split():
        step()
        if word := _bare(piece):
            found.append(word)
    return found


def vectors(words: Sequence[str], width: int = WIDTH) -> Float[Tensor, "n d"]:
    """One vector per word: its character trigrams, hashed into `width` signed places.

    Words that share trigrams point the same way; others are at right angles, but for the rare
    trigrams that share a place. Entries have a mean square of 1, which is what `scaled_dot`
    expects of its inputs.

    >>> x = vectors(["attends", "attention", "words"])
    >>> torch.nn.functional.cosine_similarity(x[:1], x)
    tensor([1.0000, 0.5040, 0.1690])
    """
    places: list[int] = []
    counts: list[int] = []
    for row, word in enumerate(words):
        step()
        found: Counter[int] = Counter()
        for at, trigram in enumerate(trigrams(word)):
            if at % MANY == 0:
                step()
            place = zlib.crc32(trigram.encode("utf-8", "surrogatepass"))
            found[place % width] += 1 if place >> 31 else -1
        places += (row * width + place for place in found)
        counts += found.values()
    rows = torch.zeros(len(words) * width)
    rows[torch.tensor(places, dtype=torch.long)] = torch.tensor(counts, dtype=rows.dtype)
    # Two trigrams of one word may cancel; a word without any direction stays at zero.
    unit = torch.nn.functional.normalize(rows.view(len(words), width), dim=-1)
    return unit * math.sqrt(width)


def trigrams(word: str) -> Iterator[str]:
    """Every three neighbouring characters, the word's two ends marked.

    >>> list(trigrams("Read"))
    ['^re', 'rea', 'ead', 'ad$']
    """
    marked = f"^{word.casefold()}$"
    return (marked[i : i + 3] for i in range(len(marked) - 2))


def _bare(word: str) -> str:
    n = len(word)
    first = next((i for i in range(n) if _is_inside(word[i])), n)
    last = next((i for i in reversed(range(first, n)) if _is_inside(word[i])), -1)
    return word[first : last + 1]


def _is_inside(sign: str) -> bool:
    """Whether a word may begin or end with it: it is no punctuation and no control character."""
    return unicodedata.category(sign)[0] not in "PC"
