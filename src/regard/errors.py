"""The one error of regard: what was asked, what came, what is accepted, what to do. And its one
warning."""

from __future__ import annotations

from regard.visible import visible


class RegardError(ValueError):
    """A request that cannot be met, explained.

    >>> raise RegardError("q has no head axis", got="[7]", accepted="[N, D]", do="add an axis")
    Traceback (most recent call last):
    ...
    regard.errors.RegardError: q has no head axis
      got:      [7]
      accepted: [N, D]
      do:       add an axis
    """

    def __init__(self, problem: str, *, got: str = "", accepted: str = "", do: str = "") -> None:
        lines = [problem]
        for label, text in (("got:", got), ("accepted:", accepted), ("do:", do)):
            if text:
                lines.append(f"  {label:<9} {text}")
        # What it quotes may be from a file, and is printed on terminals.
        super().__init__(visible("\n".join(lines)))


class RegardWarning(UserWarning):
    """A problem that does not stop the program, but should be looked at."""
