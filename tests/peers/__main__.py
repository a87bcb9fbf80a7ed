"""Run the peers' own tests with regard in them, and print what ends otherwise: `make peers`."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

import regard
from tests.peers import suites
from tests.peers.checkouts import PYTORCH, TRANSFORMERS, Peer
from tests.peers.differences import differences, expected, unexpected
from tests.peers.outcomes import NoOutcomesError, run
from tests.peers.report import AS_IS, HEADS, Report

PEERS = (TRANSFORMERS, PYTORCH)


def main() -> int:
    asked = _arguments()
    # All of them now: that one cannot be had would else be said after half an hour.
    checkouts = {peer: peer.checkout(getattr(asked, peer.name)) for peer in asked.peers}
    console, report = Console(), Report(expected())
    about = _about(checkouts)
    for suite in _suites(checkouts, asked):
        try:
            _run(suite, report, console)
        except NoOutcomesError as error:
            report.broken.append(suite.name)
            _print(console, str(error))
        if asked.results:
            # After each: what ran is kept where the rest is interrupted.
            asked.results.write_text(report.markdown(about), "utf-8")
    table = Table(*HEADS)
    for row in report.rows:
        table.add_row(*row.cells())
    console.print(table)
    for count, reason in report.reasons():
        _print(console, f"{count:>4} expected: {reason}")
    for line in report.sums():
        _print(console, line)
    return 1 if report.fails else 0


def _run(suite: suites.Suite, report: Report, console: Console) -> None:
    plain = run(suite.checkout, suite.arguments)
    report.add(suite.name, AS_IS, plain)
    for variant in suite.variants:
        ours = run(suite.checkout, suite.arguments, variant.plugins, **variant.variables)
        if not any(ours.counts.values()):
            raise NoOutcomesError(f"{suite.name}, {variant.name}: regard was never asked")
        differ = differences(variant.name, plain, ours)
        row = report.add(suite.name, variant.name, ours, differ)
        for one in differ:
            mark = "NEW" if unexpected([one], report.known) else "known"
            _print(console, f"{mark:<5} {one.variant}  {one.test}")
            _print(console, f"      {one.plain} → {one.ours}: {one.why}")
        ends = ", ".join(f"{n} {end}" for end, n in row.ends.items())
        _print(console, f"{suite.name}, {variant.name}: {ends}; {row.looked_at}")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("peers", nargs="*", help="transformers, pytorch; both by default")
    for peer in PEERS:
        parser.add_argument(f"--{peer.name}", type=Path, help="a checkout; cloned by default")
    parser.add_argument("--families", nargs="+", default=suites.FAMILIES)
    parser.add_argument("--variants", nargs="+", default=list(suites.VARIANTS), metavar="VARIANT",
                        choices=list(suites.VARIANTS), help="of transformers")  # fmt: skip
    parser.add_argument("--backends", nargs="+", default=suites.BACKENDS)
    parser.add_argument("--results", type=Path, help="a Markdown file for what was found")
    asked = parser.parse_args()
    unknown = set(asked.peers) - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    asked.peers = [peer for peer in PEERS if not asked.peers or peer.name in asked.peers]
    return asked


def _suites(checkouts: dict[Peer, Path], asked: argparse.Namespace) -> Iterator[suites.Suite]:
    if TRANSFORMERS in checkouts:
        yield from suites.transformers(checkouts[TRANSFORMERS], asked.families, asked.variants)
    if PYTORCH in checkouts:
        yield from suites.pytorch(checkouts[PYTORCH], asked.backends)


def _about(checkouts: dict[Peer, Path]) -> dict[str, str]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "regard": regard.__version__,
    } | {f"tests of {peer.name}": peer.version(folder) for peer, folder in checkouts.items()}


if __name__ == "__main__":
    raise SystemExit(main())
