"""Word vectors as text: a word and its numbers on each line, as word2vec and GloVe write them."""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from regard.errors import RegardError
from regard.lab.word_vectors.vectors import Vectors

MANY = 100_000
"""Lines that are read at most: files begin with the most frequent words."""
LONGEST = 1 << 20
"""Letters of a line, at most."""
LARGEST = 1e15
"""Numbers whose squares float32 adds up."""
ACCEPTED = "lines of a word and its numbers, as word2vec and GloVe write them as text, or that .gz"


def read(path: Path) -> Vectors:
    """The first vectors of a file, words in lower case; of several forms of a word the first.

    A first line of two numbers, how many words there are and how wide, is that of word2vec."""
    names: dict[str, None] = {}
    rows: list[array[float]] = []
    for number, line in enumerate(_lines(path), 1):
        word, *numbers = _parts(line.rstrip(), len(rows[0]) if rows else None)
        if number == 1 and len(numbers) == 1 and (word + numbers[0]).isdigit():
            continue
        row = _numbers(path, number, numbers)
        if rows and len(row) != len(rows[0]):
            raise RegardError(
                "vectors of a file are equally wide",
                got=f"{path}, line {number}: {len(row)} numbers, {len(rows[0])} before",
                accepted=ACCEPTED,
            )
        if word.lower() not in names:
            names[word.lower()] = None
            rows.append(row)
    if len(rows) < 2:
        raise RegardError("there are no vectors in the file", got=str(path), accepted=ACCEPTED)
    return Vectors.of(list(names), torch.stack([torch.tensor(row) for row in rows]))


def _parts(line: str, width: int | None) -> list[str]:
    """A word and its numbers. Once it is known how many these are, a word may hold spaces, as
    ". . ." does in some files, but no number.

    >>> _parts(". . . 4 5", 2), _parts("queen 1 2 3", 2)
    (['. . .', '4', '5'], ['queen', '1', '2', '3'])
    """
    whole = line.split(" ")
    if width is None or len(whole) <= width + 1:
        return whole
    before = whole[-width - 1]
    if before.lstrip("+-")[:1].isdigit():
        return whole
    return line.rsplit(" ", width)


def _numbers(path: Path, line: int, texts: list[str]) -> array[float]:
    try:
        row = array("f", map(float, texts))
    except (ValueError, OverflowError):
        row = array("f")
    if len(row) < 2 or not all(abs(x) < LARGEST for x in row):
        raise RegardError(
            "a line of a file of vectors is a word and its numbers",
            got=f"{path}, line {line}: {' '.join(texts)[:40] or 'no numbers'}",
            accepted=ACCEPTED,
        )
    return row


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        opened = gzip.open if packed else open
        with opened(path, "rt", encoding="utf-8-sig") as text:
            for line in islice(iter(lambda: text.readline(LONGEST), ""), MANY):
                if len(line) == LONGEST:
                    raise RegardError(
                        "a line of the file is too long to be a vector",
                        got=f"{path}: more than {LONGEST:,} letters",
                        accepted=ACCEPTED,
                    )
                yield line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RegardError(
            "the file of vectors cannot be read",
            got=f"{path}: {getattr(error, 'strerror', None) or error}",
            accepted=ACCEPTED,
            do="vectors in a binary form: write them as text first",
        ) from None
