"""One word for a head: what it does most plainly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

RULES = {
    "induction": (("probe induction", "induction"), 0.2, 3.0),
    "duplicate": (("probe duplicate", "duplicate"), 0.2, 3.0),
    "previous": (("previous",), 0.25, 3.0),
    "separator": (("separator",), 0.4, 2.0),
    "first": (("first",), 0.25, 3.0),
    "local": (("nearby",), 0.5, 2.0),
    "broad": (("entropy",), 0.85, 0.0),
}
"""For each word: the scores that it is told by (the first that is known), the least that such a
score has to be, and how many times what random weights give, at most, in any head of the layer."""
RANKS = (("induction", "duplicate", "previous"), ("separator", "first"), ("local",), ("broad",))
"""Words that say more come first: a head that finds nothing to look for often rests on the first
token or a separator. Of several of a rank the one with the largest score is taken."""


class Held(NamedTuple):
    """A score, and the most that a head of the same layer has with random weights, or NaN."""

    value: float
    random: float = math.nan


def badge_of(scores: Mapping[str, Held]) -> str:
    """The word for a head, or none.

    >>> badge_of({"previous": Held(0.6, 0.05), "nearby": Held(0.8, 0.2)})
    'previous'
    >>> badge_of({"previous": Held(0.6, 0.5), "nearby": Held(0.9, 0.2)})
    'local'
    """
    passed: dict[str, float] = {}
    for word, (names, least, times) in RULES.items():
        known = [scores[n] for n in names if n in scores and not math.isnan(scores[n].value)]
        if not known:
            continue
        held = known[0]
        beyond = 0.0 if math.isnan(held.random) else times * held.random
        if held.value >= least and held.value >= min(beyond, 0.9):
            passed[word] = held.value
    for words in RANKS:
        some = {word: passed[word] for word in words if word in passed}
        if some:
            return max(some, key=lambda word: some[word])
    return ""
