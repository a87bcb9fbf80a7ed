"""`python -m tests.fuzz`: many cases of every target, counted, and what was found."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings

# Nothing is fetched, whatever a folder names.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.fuzz.running import run
from tests.fuzz.targets import targets


def main() -> int:
    words = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    words.add_argument("--cases", type=int, default=10_000, help="cases of all targets together")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--only", default="", help="targets whose name begins so")
    asked = words.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    chosen = [t for t in targets() if t.name.startswith(asked.only)]
    whole = sum(t.share for t in chosen)
    found, total = [], 0
    for target in chosen:
        outcome = run(target, max(1, round(asked.cases * target.share / whole)), asked.seed)
        print(outcome, flush=True)
        found += outcome.findings
        total += sum(outcome.counts.values())
    print(f"{total} cases, {len(found)} findings (--seed {asked.seed})")
    for finding in found:
        print(f"\n{finding}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
