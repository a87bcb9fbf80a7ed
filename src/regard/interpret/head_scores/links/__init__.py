"""Which heads link one word to another."""

from regard.interpret.head_scores.links.link_scores import links_of
from regard.interpret.head_scores.links.link_table import Link, Links

__all__ = ["Link", "Links", "links_of"]
