"""What heads do: scores with plain names, each beside what random weights give."""

from regard.interpret.head_scores.links.link_table import Link, Links
from regard.interpret.head_scores.measurement import heads
from regard.interpret.head_scores.seen_badges import badges
from regard.interpret.head_scores.syntax.syntax_table import Follows, Syntax
from regard.interpret.head_scores.tables.head_table import HeadRow, HeadScores, Score

__all__ = [
    "Follows",
    "HeadRow",
    "HeadScores",
    "Link",
    "Links",
    "Score",
    "Syntax",
    "badges",
    "heads",
]
