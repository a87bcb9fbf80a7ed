"""Hours of use in minutes, with what goes wrong in them: `make soak`."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Mapping


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["training", "app"], default="training")
    parser.add_argument("--minutes", type=float, default=5.0, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="decides what is done in which order")
    asked = parser.parse_args()
    began = time.monotonic()

    def tell(counts: Mapping[str, int]) -> None:
        listed = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        print(f"{time.monotonic() - began:6.0f} s  {listed}", flush=True)

    run = importlib.import_module(f"tests.soak.{asked.what}").run
    if asked.what == "training":
        tell(run(60 * asked.minutes, asked.seed, tell))
    else:
        run(60 * asked.minutes)
    print("nothing was left behind")


if __name__ == "__main__":
    main()
