"""What regard changes about a peer's tests, and which of it is known and why."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tests.peers.outcomes import Outcomes

FILE = Path(__file__).with_name("expected.toml")


@dataclass(frozen=True)
class Difference:
    """A test that ends otherwise with regard in it."""

    variant: str
    test: str
    plain: str
    ours: str
    why: str = ""


@dataclass(frozen=True)
class Expected:
    """A difference that is meant: `variant` and `test` may hold wildcards."""

    variant: str
    test: str
    reason: str

    def covers(self, variant: str, test: str) -> bool:
        return fnmatchcase(variant, self.variant) and fnmatchcase(test, self.test)


def differences(variant: str, plain: Outcomes, ours: Outcomes) -> list[Difference]:
    """The tests that end otherwise; one that only one of the runs has does too."""
    found = []
    for test in sorted(plain.tests.keys() | ours.tests.keys()):
        before, after = plain.tests.get(test), ours.tests.get(test)
        ends = [None if end is None else end.outcome for end in (before, after)]
        if ends[0] != ends[1]:
            why = next((end.why for end in (after, before) if end is not None and end.why), "")
            found.append(Difference(variant, test, *(end or "did not run" for end in ends), why))
    return found


def expected(file: Path = FILE) -> list[Expected]:
    return [Expected(**entry) for entry in tomllib.loads(file.read_text())["difference"]]


def unexpected(found: Iterable[Difference], known: Sequence[Expected]) -> list[Difference]:
    return [d for d in found if not any(e.covers(d.variant, d.test) for e in known)]


def outdated(
    found: Sequence[Difference], ran: Iterable[tuple[str, str]], known: Sequence[Expected]
) -> list[Expected]:
    """What is expected of tests that ran, as pairs of variant and test, and of which none differs:
    an exception that is no longer needed would hide the next fault."""
    ran = list(ran)
    return [
        e
        for e in known
        if any(e.covers(*pair) for pair in ran)
        and not any(e.covers(d.variant, d.test) for d in found)
    ]
