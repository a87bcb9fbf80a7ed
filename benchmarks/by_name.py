"""What `attn_implementation="regard"` costs beside "sdpa" and "eager": forward passes of several
lengths and generating, in turns.

PYTHONPATH=src python benchmarks/by_name.py [--device cuda] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import RESULTS, interleaved, ratios, write

import regard as regard  # so that transformers knows the name

NAMES = ("sdpa", "regard", "eager")
# Layers, heads, key heads and the width of what is between: each head is 64 wide.
SHAPES = {"cpu": (2, 8, 2, 1024), "cuda": (16, 32, 8, 8192)}
# Tokens, and how often each is measured in each of three rounds.
LENGTHS = {"cpu": {512: 5, 4096: 1}, "cuda": {512: 10, 4096: 5, 16384: 2}}
ALONE = 16384
"""From here on eager attention fills the memory, and is measured after the others."""
PROMPT, NEW = 512, 64


def build(name: str, device: str) -> Any:
    """A model of Llama's shape with random weights, the same for every name. Few words, so that
    nothing but the layers takes time."""
    layers, heads, key_heads, between = SHAPES[device]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=64 * heads,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=2 * ALONE,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # On a card at once: a CPU takes long to make so many random numbers.
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation=name, dtype=dtype
        )
    assert model.config._attn_implementation == name
    return model.eval()


def some_tokens(n: int, device: str) -> torch.Tensor:
    drawn = torch.randint(1, 1024, (1, n), generator=torch.Generator().manual_seed(1))
    return drawn.to(device)


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    device = options.device
    layers, heads, key_heads, _ = SHAPES[device]
    load = os.getloadavg()[0]
    models = {name: build(name, device) for name in NAMES}
    more = {
        "model": f"Llama's shape, {layers} layers of {heads} heads over {key_heads}, each 64 wide, "
        f"random weights, {str(models['sdpa'].dtype).removeprefix('torch.')}",
        "transformers": transformers.__version__,
        "load of the machine before": f"{load:.1f} on {os.cpu_count()} cores",
        "checked": check(models, device),
    }
    if device == "cuda":
        more["gpu"] = torch.cuda.get_device_name()
    if options.commit:
        more["commit"] = options.commit
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
