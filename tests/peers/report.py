"""What a run of the peers' tests found: a row for each run, its differences, and the sum of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.peers.differences import Difference, Expected, outdated, unexpected
from tests.peers.outcomes import Outcomes
from tests.peers.suites import VARIANTS

ENDS = ("passed", "failed", "skipped")
AS_IS = "as is"
HEADS = ("tests", "with", *ENDS, "differ", "looked at")


@dataclass(frozen=True)
class Row:
    """How one run of a suite ended: as it is, or in a variant."""

    suite: str
    variant: str
    ends: Mapping[str, int]
    differ: int = 0
    looked_at: str = ""

    def cells(self) -> tuple[str, ...]:
        ends = (f"{self.ends.get(end, 0):,}" for end in ENDS)
        return (self.suite, self.variant, *ends, str(self.differ or ""), self.looked_at)


@dataclass
class Report:
    """What was asked of each peer, and what came of it."""

    known: Sequence[Expected]
    rows: list[Row] = field(default_factory=list)
    found: list[Difference] = field(default_factory=list)
    ran: list[tuple[str, str]] = field(default_factory=list)
    """Variant and test."""
    broken: list[str] = field(default_factory=list)
    """Suites of which there are no outcomes."""

    def add(
        self, suite: str, variant: str, outcomes: Outcomes, differ: Sequence[Difference] = ()
    ) -> Row:
        looked_at = ", ".join(f"{n:,} {what}" for what, n in outcomes.counts.items())
        ends = Counter(end.outcome for end in outcomes.tests.values())
        row = Row(suite, variant, ends, len(differ), looked_at)
        self.rows.append(row)
        self.found += differ
        if variant != AS_IS:
            self.ran += [(variant, test) for test in outcomes.tests]
        return row

    @property
    def new(self) -> list[Difference]:
        return unexpected(self.found, self.known)

    @property
    def outdated(self) -> list[Expected]:
        return outdated(self.found, self.ran, self.known)

    @property
    def fails(self) -> bool:
        return bool(self.new or self.outdated or self.broken)

    def reasons(self) -> Iterator[tuple[int, str]]:
        """How many differences each reason explains, in the order of the list."""
        for reason in dict.fromkeys(entry.reason for entry in self.known):
            entries = [entry for entry in self.known if entry.reason == reason]
            count = sum(any(e.covers(d.variant, d.test) for e in entries) for d in self.found)
            if count:
                yield count, reason

    def sums(self) -> list[str]:
        """The run in a few lines: how much ran of what, how it ended, and what differs."""
        lines = []
        for variant in dict.fromkeys(row.variant for row in self.rows):
            rows = [row for row in self.rows if row.variant == variant]
            ends = ", ".join(f"{sum(r.ends.get(end, 0) for r in rows):,} {end}" for end in ENDS)
            kind = "families" if variant in VARIANTS else "suites"
            lines.append(f"{variant}: {len(rows)} {kind}; {ends}")
        lines += [f"did not run: {suite}" for suite in self.broken]
        lines += [f"expected, but the same now: {e.variant}  {e.test}" for e in self.outdated]
        new = len(self.new)
        lines.append(
            f"{len(self.found)} differences: {len(self.found) - new} expected, {new} unexpected"
        )
        return lines

    def markdown(self, about: Mapping[str, str]) -> str:
        lines = ["# The peers' own tests with regard in them", ""]
        lines += [f"- {key}: {value}" for key, value in about.items()]
        lines += ["", *_table(HEADS, (row.cells() for row in self.rows)), ""]
        lines += [f"- {line}" for line in self.sums()]
        if self.found:
            lines += ["", "## Differences that are meant", ""]
            lines += _table(("tests", "reason"), ((str(n), why) for n, why in self.reasons()))
        if self.new:
            lines += ["", "## Differences that are not", ""]
            ends = ((d.variant, d.test, f"{d.plain} → {d.ours}") for d in self.new)
            lines += _table(("with", "test", "ends"), ends)
        return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows)]
