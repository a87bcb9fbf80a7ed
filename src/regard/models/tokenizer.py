"""Byte-level BPE out of a tokenizer.json: text to ids and back, for any text, without a library.

The file is the usual one, and the `tokenizers` library reads it too. What this reads of it is the
vocabulary and the merges; how text is cut into words is fixed here, and said in the file as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

from regard.cancellation import step
from regard.errors import RegardError
from regard.files import read_json

MARK = 0
"""The id that stands before each text, and after it. No text contains it."""
MARK_TEXT = "<text>"
REMEMBERED = 64
"""Bytes of a word of which the pieces are remembered, at most."""

# Words with the space before them, numbers digit by digit, marks, white space. Classes are of plain
# letters, so that every library of regular expressions cuts at the same places.
PATTERN = (
    r"'(?:s|t|d|m|ll|re|ve)| ?[A-Za-z]+| ?[0-9]| ?[^ \t\n\rA-Za-z0-9]+"
    r"|[ \t\n\r]+(?![^ \t\n\r])|[ \t\n\r]+"
)


class Tokenizer:
    """Ids of text, and text of ids.

    >>> t = Tokenizer({MARK_TEXT: 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4, "Ġab": 5},
    ...               [("a", "b"), ("Ġ", "ab")])
    >>> t.encode("ab abb"), t.decode([3, 5, 2])
    ([3, 5, 2], 'ab abb')
    """

    def __init__(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        self.vocabulary = vocabulary
        self.pieces = {i: piece for piece, i in vocabulary.items()}
        self.merges = merges
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._known = lru_cache(1 << 16)(self._merged)

    @staticmethod
    def read(path: Path) -> Tokenizer:
        """From a tokenizer.json that models/train/vocabulary.py wrote."""
        try:
            about = read_json(Path(path))
            model = about["model"]
            merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
            vocabulary = dict(model["vocab"])
            _check(vocabulary, merges)
            split = about["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
            if split != PATTERN or about["normalizer"] is not None or about["added_tokens"]:
                raise ValueError("text is cut into words in another way")
            return Tokenizer(vocabulary, merges)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise RegardError(
                "the tokenizer cannot be read",
                got=f"{path}: {error}",
                accepted="a tokenizer.json of byte-level BPE as models/train makes it",
                do="tokenizers of other models are read through regard.models.load(folder)",
            ) from None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without marks."""
        found: list[int] = []
        try:
            for word in re.finditer(PATTERN, text):
                step()
                found.extend(self._word(word.group().encode()))
        except UnicodeEncodeError as error:
            raise RegardError(
                "the text holds half of a surrogate pair, which is no character",
                got=str(error),
                accepted="text of whole ones",
            ) from None
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without marks; bytes that are no text become �."""
        spelled = "".join(self._piece(i) for i in ids if i != MARK)
        return bytes(BYTES[letter] for letter in spelled).decode(errors="replace")

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """The pieces as the vocabulary spells them; `regard.watch` shows half characters so."""
        return [self._piece(i) for i in ids]

    def __len__(self) -> int:
        return len(self.vocabulary)

    def _piece(self, i: int) -> str:
        if i not in self.pieces:
            raise RegardError("no token has that id", got=str(i), accepted=f"0 to {len(self) - 1}")
        return self.pieces[i]

    def _word(self, word: bytes) -> tuple[int, ...]:
        # Words that come again are short; what has no spaces would fill the memory.
        return self._known(word) if len(word) <= REMEMBERED else self._merged(word)

    def _merged(self, word: bytes) -> tuple[int, ...]:
        """The pieces of one word: the oldest merge first, everywhere, until none is left."""
        # Parts are linked to their neighbours: a merge costs the same in words of any length.
        parts: list[str | None] = [LETTERS[byte] for byte in word]
        after = [*range(1, len(parts)), -1]
        before = [-1, *range(len(parts) - 1)]
        waiting = [
            (self._ranks[pair], at)
            for at, pair in enumerate(pairwise(parts))
            if pair in self._ranks
        ]
        heapify(waiting)
        while waiting:
            step()
            rank, at = heappop(waiting)
            left, right = self.merges[rank]
            behind = after[at]
            # A part that took part in another merge meanwhile is no longer what was noted.
            if parts[at] != left or behind < 0 or parts[behind] != right:
                continue
            parts[at], parts[behind] = left + right, None
            after[at] = after[behind]
            if after[at] >= 0:
                before[after[at]] = at
            for first in (before[at], at):
                second = after[first] if first >= 0 else -1
                if second >= 0:
                    known = self._ranks.get((parts[first], parts[second]))  # type: ignore[arg-type]
                    if known is not None:
                        heappush(waiting, (known, first))
        return tuple(self.vocabulary[part] for part in parts if part is not None)


def _check(vocabulary: dict[Any, Any], merges: list[tuple[Any, ...]]) -> None:
    """Whether every text has tokens, and every token a text."""
    ids = vocabulary.values()
    if any(type(i) is not int for i in ids) or sorted(ids) != list(range(len(ids))):
        raise ValueError("ids are not 0, 1, 2 …")
    plain = {piece for piece, i in vocabulary.items() if i != MARK}
    odd = [piece for piece in plain if not isinstance(piece, str) or not piece]
    odd += [piece for piece in plain if not set(piece) <= BYTES.keys()]
    odd += [letter for letter in BYTES if letter not in plain]
    if odd:
        raise ValueError(f"pieces that are no bytes, or bytes that are no piece: {odd[:3]!r:.80}")
    for pair in merges:
        if len(pair) != 2 or pair[0] + pair[1] not in plain:
            raise ValueError(f"a merge that gives no piece: {pair!r:.80}")


def _letters() -> dict[int, str]:
    """A visible letter for each byte, as GPT-2 chose them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


LETTERS = _letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}
