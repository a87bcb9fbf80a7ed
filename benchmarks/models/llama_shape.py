"""A model of Llama's shape, and what benchmarks that measure it have in common."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.measurement import RESULTS

# Layers, heads, key heads and the width of what is between: each head is 64 wide.
SHAPES = {"cpu": (2, 8, 2, 1024), "cuda": (16, 32, 8, 8192)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
LONGEST = 16384
"""Tokens of the longest text that it is measured with."""


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
        max_position_embeddings=2 * LONGEST,
    )
    # On a card at once: a CPU takes long to make so many random numbers.
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation=name, dtype=DTYPES[device]
        )
    assert model.config._attn_implementation == name
    return model.eval()


def some_tokens(n: int, device: str) -> torch.Tensor:
    drawn = torch.randint(1, 1024, (1, n), generator=torch.Generator().manual_seed(1))
    return drawn.to(device)


def options_of(documentation: str | None) -> argparse.Namespace:
    """What a benchmark was called with."""
    parser = argparse.ArgumentParser(description=(documentation or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    transformers.utils.logging.set_verbosity_error()
    return parser.parse_args()


def told(options: argparse.Namespace, also: str) -> dict[str, str]:
    """What is written beside results: the model, and the machine before it is busy."""
    layers, heads, key_heads, _ = SHAPES[options.device]
    more = {
        "model": f"Llama's shape, {layers} layers of {heads} heads over {key_heads}, each 64 wide, "
        f"random weights, {also}",
        "transformers": transformers.__version__,
        "load of the machine before": f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    }
    if options.device == "cuda":
        more["gpu"] = torch.cuda.get_device_name()
    if options.commit:
        more["commit"] = options.commit
    return more
