"""What `attn_implementation="regard"` costs beside "sdpa" and "eager": forward passes of several
lengths and generating, in turns.

PYTHONPATH=src python -m benchmarks.models.by_name [--device cuda] [--out FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

import regard as regard  # so that transformers knows the name
from benchmarks.measurement import interleaved, ratios, write
from benchmarks.models.llama_shape import DTYPES, LONGEST, build, options_of, some_tokens, told

NAMES = ("sdpa", "regard", "eager")
# Tokens, and how often each is measured in each of three rounds.
LENGTHS = {"cpu": {512: 5, 4096: 1}, "cuda": {512: 10, 4096: 5, 16384: 2}}
ALONE = LONGEST
"""From here on eager attention fills the memory, and is measured after the others."""
PROMPT, NEW = 512, 64


@torch.no_grad()
def check(models: Mapping[str, Any], device: str) -> str:
    """Whether all give the same answers, before they are measured."""
    ids = some_tokens(384, device)
    answers = {name: model(ids, use_cache=False).logits.float() for name, model in models.items()}
    most = answers["eager"].abs().max()
    apart = {n: float((answers[n] - answers["eager"]).abs().max() / most) for n in NAMES[:2]}
    # In half precision no two implementations round alike.
    assert max(apart.values()) < (1e-4 if device == "cpu" else 0.05), apart
    return ", ".join(f"{name} within {far:.1e} of eager" for name, far in apart.items())


def beside(
    models: Mapping[str, Any], act: Callable[[Any], object]
) -> dict[str, Callable[[], None]]:
    """What is done with a model of each name. One is there twice, to see how far two
    measurements of one and the same thing are apart."""

    def run(model: Any) -> Callable[[], None]:
        @torch.no_grad()
        def once() -> None:
            act(model)
            if model.device.type == "cuda":
                torch.cuda.synchronize()

        return once

    again = {"sdpa": models["sdpa"], "sdpa again": models["sdpa"]}
    return {name: run(model) for name, model in (again | dict(models)).items()}


def forward(models: Mapping[str, Any], n: int, repeats: int, device: str) -> dict[str, Any]:
    ids = some_tokens(n, device)
    runs = beside(models, lambda model: model(ids, use_cache=False, logits_to_keep=1))
    what = {"what": f"forward, {n} tokens"}
    if n < ALONE:
        return what | ratios(runs, repeats)
    eager = runs.pop("eager")
    row = what | ratios(runs, repeats)
    try:
        times = interleaved({"eager": eager}, 1)["eager"] * 1e3 / row["sdpa ms"]
    except torch.OutOfMemoryError:
        return row | {"eager: mean": "out of memory", "eager: worst": "out of memory"}
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
    return row | {"eager: mean": times, "eager: worst": times}


def generating(models: Mapping[str, Any], device: str) -> dict[str, Any]:
    ids = some_tokens(PROMPT, device)
    shown = torch.ones_like(ids)

    def generate(model: Any) -> None:
        model.generate(
            ids, attention_mask=shown, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip

    return {"what": f"{NEW} tokens after {PROMPT}"} | ratios(beside(models, generate), 1)


def main() -> None:
    options = options_of(__doc__)
    device = options.device
    more = told(options, str(DTYPES[device]).removeprefix("torch."))
    models = {name: build(name, device) for name in NAMES}
    more["checked"] = check(models, device)
    rows = []
    for n, repeats in LENGTHS[device].items():
        rows.append(forward(models, n, repeats, device))
        # What is measured is told at once: the rest may take longer than somebody waits.
        print(rows[-1], file=sys.stderr, flush=True)
    rows.append(generating(models, device))
    title = "Times as long as with sdpa: mean and worst of three rounds (lower is better)"
    write("by_name" if device == "cpu" else "by_name_gpu", {title: rows}, more, options.out)


if __name__ == "__main__":
    main()
