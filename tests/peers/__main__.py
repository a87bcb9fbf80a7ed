"""Run the peers' own tests with regard in them, and print what ends otherwise: `make peers`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.peers import suites
from tests.peers.checkouts import PYTORCH, TRANSFORMERS
from tests.peers.differences import (
    Difference,
    Expected,
    differences,
    expected,
    outdated,
    unexpected,
)
from tests.peers.outcomes import Outcomes, run


def main() -> int:
    asked = _arguments()
    console = Console()
    table = Table("tests", "with", "passed", "failed", "skipped", "differ")
    known, found, ran = expected(), list[Difference](), list[tuple[str, str]]()
    for suite in _suites(asked):
        plain = run(suite.checkout, suite.arguments)
        _add_rows(table, "as is", plain)
        for variant in suite.variants:
            ours = run(suite.checkout, suite.arguments, variant.plugins, **variant.variables)
            if not any(ours.counts.values()):
                raise SystemExit(f"{variant.name}: regard was never asked")
            differ = differences(variant.name, plain, ours)
            ran += [(variant.name, test) for test in plain.tests]
            found += differ
            _add_rows(table, variant.name, ours, differ)
            for one in differ:
                mark = "NEW" if unexpected([one], known) else "known"
                _print(console, f"{mark:<5} {one.variant}  {one.test}")
                _print(console, f"      {one.plain} → {one.ours}: {one.why}")
            looked_at = ", ".join(f"{n:,} {what}" for what, n in ours.counts.items())
            console.print(f"{variant.name}: {looked_at}")
    console.print(table)
    for reason, group in groupby(sorted(known, key=_reason), _reason):
        entries = list(group)
        count = sum(any(e.covers(d.variant, d.test) for e in entries) for d in found)
        if count:
            _print(console, f"{count:>4} expected: {reason}")
    new, old = unexpected(found, known), outdated(found, ran, known)
    for entry in old:
        _print(console, f"expected, but the same now: {entry.variant}  {entry.test}")
    console.print(f"{len(found)} differences, {len(new)} of them not expected")
    return 1 if new or old else 0


def _reason(entry: Expected) -> str:
    return entry.reason


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("peers", nargs="*", help="transformers, pytorch; both by default")
    parser.add_argument("--transformers", type=Path, help="a checkout; cloned by default")
    parser.add_argument("--pytorch", type=Path, help="a checkout; cloned by default")
    parser.add_argument("--families", nargs="+", default=suites.FAMILIES)
    parser.add_argument("--backends", nargs="+", default=suites.BACKENDS)
    asked = parser.parse_args()
    unknown = set(asked.peers) - {"transformers", "pytorch"}
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    asked.peers = asked.peers or ["transformers", "pytorch"]
    return asked


def _suites(asked: argparse.Namespace) -> Iterator[suites.Suite]:
    if "transformers" in asked.peers:
        yield from suites.transformers(TRANSFORMERS.checkout(asked.transformers), asked.families)
    if "pytorch" in asked.peers:
        yield from suites.pytorch(PYTORCH.checkout(asked.pytorch), asked.backends)


def _add_rows(
    table: Table, variant: str, outcomes: Outcomes, differ: Sequence[Difference] = ()
) -> None:
    files = Counter((_file(test), end.outcome) for test, end in outcomes.tests.items())
    others = Counter(_file(one.test) for one in differ)
    for file in dict.fromkeys(file for file, _ in files):
        ends = [str(files[file, end]) for end in ("passed", "failed", "skipped")]
        table.add_row(file, variant, *ends, str(others[file] or ""))


def _file(test: str) -> str:
    return Path(test.partition("::")[0]).stem.removeprefix("test_")


if __name__ == "__main__":
    raise SystemExit(main())
