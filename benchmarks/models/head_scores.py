"""What the scores of all heads cost beside a plain forward pass, in turns.

PYTHONPATH=src python -m benchmarks.models.head_scores [--device cuda] [--out FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measurement import ratios, write
from benchmarks.models.llama_shape import build, options_of, some_tokens, told
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
    options = options_of(__doc__)
    device = options.device
    more = told(options, "attn_implementation sdpa")
    model = build("sdpa", device)
    rows = [compared(model, n, repeats, device) for n, repeats in LENGTHS[device].items()]
    title = "Times as long as a forward pass: mean and worst of three rounds (lower is better)"
    name = "head_scores" if device == "cpu" else "head_scores_gpu"
    write(name, {title: rows}, more, options.out)


if __name__ == "__main__":
    main()
