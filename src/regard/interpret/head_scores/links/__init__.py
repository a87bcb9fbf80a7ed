"""Which heads link one word to another."""

from regard.interpret.head_scores.links.link_table import Link, Links
from regard.interpret.head_scores.links.linking import links_of

__all__ = ["Link", "Links", "links_of"]
