"""What is known of an embedded model: data, steps, loss, licence, and which heads do what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.files import read_json


class Card(Mapping[str, Any]):
    """The facts of card.json; prints as lines.

    >>> Card({"licence": "Apache-2.0", "loss": {"stories": 1.25}})
    licence  Apache-2.0
    loss     stories 1.25
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    @staticmethod
    def read(path: Path) -> Card:
        """From a file; empty if there is none."""
        if not path.exists() and not path.is_symlink():
            return Card({})
        try:
            return Card(read_json(path))
        except (OSError, ValueError) as error:
            raise RegardError("the card cannot be read", got=f"{path}: {error}") from None

    def __getitem__(self, fact: str) -> Any:
        if fact not in self._facts:
            known = ", ".join(self._facts) or "none: there is no card"
            raise RegardError(f"the card says nothing of {fact!r}", accepted=known)
        return self._facts[fact]

    def __contains__(self, fact: object) -> bool:
        return fact in self._facts

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __repr__(self) -> str:
        width = max(map(len, self._facts), default=0)
        lines = [f"{fact:<{width}}  {_shown(value)}" for fact, value in self._facts.items()]
        return "\n".join(lines) or "Card(nothing known)"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
