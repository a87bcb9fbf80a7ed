"""The texts that models are trained on: read out of packages, cleaned, and written as token ids."""

from __future__ import annotations

import ast
import re
from array import array
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from models.train.packages import BIBLES, BOOKS, KING_JAMES, Package
from regard.models.tokenizer import MARK
from regard.models.tokenizer import Tokenizer as Own

DATA = Path(__file__).parents[1] / "data"
"""Where everything that is prepared and sampled lies; not part of the repository."""

TITLES = (
    "austen-emma", "austen-persuasion", "austen-sense", "blake-poems", "bryant-stories",
    "burgess-busterbrown", "carroll-alice", "chesterton-ball", "chesterton-brown",
    "chesterton-thursday", "edgeworth-parents", "melville-moby_dick", "milton-paradise",
    "shakespeare-caesar", "shakespeare-hamlet", "shakespeare-macbeth", "whitman-leaves",
)  # fmt: skip
HELD_BOOKS = {8: "Ruth", 32: "Jonah", 50: "Philippians", 62: "1 John"}
"""Books of the Bible by number that the translator never reads in training."""
LONGEST_VERSE = 400
"""Letters; nineteen of twenty verses are shorter than 260."""


def books() -> list[str]:
    """The Gutenberg set without its Bible, one text a book."""
    return [unwrapped(BOOKS.read(f"package/gutenberg/{title}.txt").decode("latin-1"))
            for title in TITLES]  # fmt: skip


def unwrapped(text: str) -> str:
    """Paragraphs of prose as one line each; verse keeps its lines.

    >>> unwrapped("CHAPTER I\\r\\n\\r\\n\\r\\nThe family had long been settled in\\r\\nSussex.")
    'CHAPTER I\\nThe family had long been settled in Sussex.'
    """
    text = text.replace("\r\n", "\n").replace("_", "")
    paragraphs = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        lines = [" ".join(line.split()) for line in paragraph.splitlines() if line.strip()]
        # Prose fills its lines up to a margin, but for the last.
        full = [len(line) for line in lines[:-1]]
        prose = len(lines) == 2 or (bool(full) and sum(full) / len(full) > 50)
        if lines:
            paragraphs.append((" " if prose else "\n").join(lines))
    return "\n".join(paragraphs)


def bibles() -> list[str]:
    """The King James Version and the World English Bible, one text a chapter."""
    found = []
    for package in (KING_JAMES, BIBLES["World English Bible"]):
        chapters: dict[int, list[str]] = {}
        for place, verse in verses(package).items():
            chapters.setdefault(place // 1000, []).append(verse)
        found += [" ".join(chapter) for chapter in chapters.values()]
    return found


def verses(package: Package) -> dict[int, str]:
    """The verses of a Bible by book, chapter and verse: 1001001 is the first of all."""
    name = package.name.replace("-", "_")
    source = package.read(f"{name}/plain_text_readers_bible.py").decode()
    # A call Bible(version, text, {place: where it starts}, {place: where it ends}, ...): read as
    # data, never run.
    call = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call))
    text, starts, ends = (ast.literal_eval(part) for part in call.args[1:4])
    return {place: cleaned(text[start : ends[place]]) for place, start in starts.items()}


def cleaned(verse: str) -> str:
    """A verse without the marks of editors.

    >>> cleaned("{A Psalm of David.} The LORD [is] my  shepherd; God`s people’s.")
    "The LORD is my shepherd; God's people's."
    """
    verse = re.sub(r"\{[^}]*\}", "", verse).replace("`", "'").replace("’", "'")
    verse = verse.replace("—", " - ").replace("æ", "ae").replace("Æ", "Ae")
    return " ".join(re.sub(r"[\[\]*]", "", verse).split())


def pairs() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(newer English, King James English), to learn from and held out.

    Verses are said as they stand, and again clause by clause where both sides have as many, so that
    short sentences are known too.
    """
    target = verses(KING_JAMES)
    learned: list[tuple[str, str]] = []
    held: list[tuple[str, str]] = []
    for name, package in BIBLES.items():
        newest = name == "World English Bible"
        for place, verse in verses(package).items():
            pair = verse, target.get(place, "")
            if not all(0 < len(side) <= LONGEST_VERSE for side in pair):
                continue
            if place // 1_000_000 in HELD_BOOKS:
                held += [pair] if newest else []
            else:
                learned += [pair, *clauses(*pair)] if newest else [pair]
    return learned, held


def clauses(source: str, target: str) -> list[tuple[str, str]]:
    """The parts of a verse, if both sides have as many and of like lengths.

    >>> clauses("You are here; they aren't.", "Thou art here: they are not.")
    [('You are here;', 'Thou art here:'), ("they aren't.", 'they are not.')]
    """
    sides = [re.split(r"(?<=[.;:!?])['\"]? ", side) for side in (source, target)]
    if not len(sides[0]) == len(sides[1]) > 1:
        return []
    both = list(zip(*sides, strict=True))
    alike = all(0.6 < len(a) / len(b) < 1.6 for a, b in both)
    return both if alike else []


def encoded(tokenizer: Path, texts: Sequence[str], at_once: int = 20_000) -> Tensor:
    """All texts as one row of ids, a mark before each: int16, as 4,096 ids fit."""
    flat = array("h")
    for start in range(0, len(texts), at_once):
        for row in batches(tokenizer, texts[start : start + at_once]):
            flat.append(MARK)
            flat.extend(row)
    return torch.frombuffer(flat, dtype=torch.int16).clone()


def batches(tokenizer: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, by the library that made the vocabulary: quicker than ours, which does
    where that is not installed."""
    if find_spec("tokenizers") is None:
        own = Own.read(tokenizer)
        return [own.encode(text) for text in texts]
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(tokenizer))
    return [found.ids for found in made.encode_batch_fast(list(texts))]
