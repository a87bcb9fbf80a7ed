"""What the scores of all heads cost beside a plain forward pass, in turns.

PYTHONPATH=src python benchmarks/head_scores.py [--device cuda] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from by_name import SHAPES, build, some_tokens
from measuring import RESULTS, ratios, write

from regard import interpret

# Tokens, and how often each is measured in each of three rounds.
LENGTHS = {"cpu": {1024: 2}, "cuda": {4096: 3, 16384: 2}}


def compared(model: Any, n: int, repeats: int, device: str) -> dict[str, Any]:
    ids = some_tokens(n, device)

    def finished(act: Callable[[], object]) -> Callable[[], None]:
        @torch.no_grad()
        def once() -> None:
            act()
            if device == "cuda":
                torch.cuda.synchronize()

        return once

    def plain() -> object:
        return model(ids, use_cache=False, logits_to_keep=1)

    def scores() -> object:
        return interpret.heads(model, [ids[0]], probes=False, random=False)

    runs = {"forward": plain, "forward again": plain, "scores of all heads": scores}
    timed = {name: finished(act) for name, act in runs.items()}
    return {"tokens": n} | ratios(timed, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    device = options.device
    layers, heads, key_heads, _ = SHAPES[device]
    load = os.getloadavg()[0]
    more = {
        "model": f"Llama's shape, {layers} layers of {heads} heads over {key_heads}, each 64 wide, "
        "random weights, attn_implementation sdpa",
        "transformers": transformers.__version__,
        "load of the machine before": f"{load:.1f} on {os.cpu_count()} cores",
    }
    if device == "cuda":
        more["gpu"] = torch.cuda.get_device_name()
    if options.commit:
        more["commit"] = options.commit
    model = build("sdpa", device)
    rows = [compared(model, n, repeats, device) for n, repeats in LENGTHS[device].items()]
    title = "Times as long as a forward pass: mean and worst of three rounds (lower is better)"
    name = "head_scores" if device == "cpu" else "head_scores_gpu"
    write(name, {title: rows}, more, options.out)


if __name__ == "__main__":
    main()
