"""The scores of heads: their names, and what each says."""

from __future__ import annotations

from regard.interpret.head_scores.pairs.pair_sums import NEAR
from regard.interpret.head_scores.pairs.pair_totals import REACH

SCORES = {
    "previous": "mean weight of the token just before, of rows that may see it",
    "next": "mean weight of the token just after, of rows that may see it",
    "offset": f"mean weight at the fixed offset that gets most, up to {REACH} places away",
    "first": "mean weight of the first token",
    "separator": "mean weight of punctuation, line ends and special tokens, the first aside",
    "duplicate": "mean weight of earlier copies of the row's own token, of rows that may see one",
    "induction": "mean weight of what followed earlier copies of the row's own token, of rows that "
    "may see one",
    "rare": "weight of rare tokens, over the share of rare tokens in the text",
    "entropy": "how spread rows are: 0 on one key, 1 alike on all that may be seen",
    "distance": "mean distance to what is looked at, in tokens",
    "nearby": f"mean weight of tokens at most {NEAR} places away, the row's own included",
    "copying": "share of the weight on tokens whose own logit the head raises by more than two "
    "standard deviations of all logits that it writes",
    "suppression": "share of the weight on tokens whose own logit it lowers by as much",
    "own logit": "how the logit of the token looked at stands among all that the head writes, in "
    "standard deviations",
    "probe previous": "previous, on random tokens that are said twice",
    "probe duplicate": "duplicate, on random tokens that are said twice",
    "probe induction": "induction, on random tokens that are said twice",
}
"""Every score, in the order of the table. All are means over rows but for `rare`: 1 is their share.
"""

COUNTS = ("distance", "own logit", "rare")
"""Scores that are no shares of 1."""


def shown(name: str, value: float) -> str:
    """A score as a table says it.

    >>> shown("previous", 0.4213), shown("distance", 12.34), shown("first", float("nan"))
    ('42%', '12.3', '–')
    """
    if value != value:
        return "–"
    return f"{value:.1f}" if name in COUNTS else f"{value:.0%}"
