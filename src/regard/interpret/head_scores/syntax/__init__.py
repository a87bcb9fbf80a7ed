"""Which heads follow a parse."""

from regard.interpret.head_scores.syntax.syntax_table import Follows, Syntax

__all__ = ["Follows", "Syntax"]
