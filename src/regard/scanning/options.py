"""What is asked of a scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.errors import RegardError

STATISTICS = {
    "entropy": "entropy of the row, in nats",
    "max_logit": "largest logit of the row",
    "first": "weight of the first token",
    "distance": "mean distance to what the row looks at, in tokens",
    "norm": "length of what the head gives the row, before the output projection",
}
"""What is observed of every row, as moments, a histogram and the texts where it is extreme."""
ROLES = "roles"
"""Scores of `interpret.heads`, of everything read together."""
OBSERVED = (*STATISTICS, ROLES)


@dataclass(frozen=True)
class Options:
    """What is read, how it is cut, and what is observed."""

    observe: tuple[str, ...] = OBSERVED
    shards: int | None = None
    """Files that the work is cut into; None is one for every 64 texts."""
    layers: tuple[str, ...] = ("*",)
    max_tokens: int | None = None
    """The beginning of each text that is read; None is all that the model can read."""
    threads: int | None = None
    """Of each process, on a CPU: they decide in which order numbers are added up. None is what the
    scan in the folder was begun with, or what PyTorch takes."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.observe if name not in OBSERVED]
        if unknown or not self.observe:
            raise RegardError(
                "observe names what is observed",
                got=", ".join(map(repr, unknown)) or "nothing",
                accepted=", ".join(OBSERVED),
            )
        for name in ("shards", "max_tokens", "threads"):
            many = getattr(self, name)
            if many is not None and many < 1:
                raise RegardError(
                    f"{name} is a number of them", got=str(many), accepted="1 or more"
                )

    @property
    def statistics(self) -> tuple[str, ...]:
        """Those of rows, in their own order."""
        return tuple(name for name in STATISTICS if name in self.observe)

    @property
    def roles(self) -> bool:
        return ROLES in self.observe


def observed(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names as a person gives them: with commas between, or a list; all of them for None. Their
    order does not matter.

    >>> observed("first,entropy")
    ('entropy', 'first')
    """
    if names is None:
        return OBSERVED
    listed = names.split(",") if isinstance(names, str) else list(names)
    asked = [name.strip() for name in listed]
    return tuple(sorted({*asked}, key=lambda n: (OBSERVED.index(n) if n in OBSERVED else -1, n)))
