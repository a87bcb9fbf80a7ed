"""`python -m tests.fuzz`: many cases of every target, counted, and what was found."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings

# Nothing is fetched, whatever a folder names.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.fuzz import http_requests
from tests.fuzz.case_runner import run
from tests.fuzz.targets import targets

HTTP = "http requests"
SHARE = 0.25
"""The part of all cases that are requests to the app."""


def main() -> int:
    words = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    words.add_argument("--cases", type=int, default=10_000, help="cases of all targets together")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--only", default="", help="targets whose name begins so")
    asked = words.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    chosen = [t for t in targets() if t.name.startswith(asked.only)]
    requests = round(asked.cases * (SHARE if chosen else 1.0)) * HTTP.startswith(asked.only)
    whole = sum(t.share for t in chosen) * asked.cases / max(1, asked.cases - requests)
    found, total = [], 0
    for target in chosen:
        outcome = run(target, max(1, round(asked.cases * target.share / whole)), asked.seed)
        print(outcome, flush=True)
        found += outcome.findings
        total += sum(outcome.counts.values())
    if requests:
        try:
            counts = http_requests.run(requests, asked.seed)
        except http_requests.Failure as failure:
            found.append(f"{HTTP}: {failure}")
        else:
            total += sum(counts.values())
            told = ", ".join(f"{word} {n}" for word, n in sorted(counts.items()))
            print(f"{HTTP:<14} {sum(counts.values()):>6} cases: {told}", flush=True)
    print(f"{total} cases, {len(found)} findings (--seed {asked.seed})")
    for finding in found:
        print(f"\n{finding}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
