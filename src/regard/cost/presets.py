"""Well-known models, with the sizes their authors published (each model's `config.json`)."""

from __future__ import annotations

import difflib

from regard.arguments import described
from regard.cost.configuration import Configuration
from regard.errors import RegardError

PRESETS: dict[str, Configuration] = {
    c.name: c
    for c in (
        Configuration("gpt2", 768, 12, 12, vocabulary=50257, tied=True, dtype="float32",
                      trained_context=1024),
        Configuration("gpt2-xl", 1600, 25, 48, vocabulary=50257, tied=True, dtype="float32",
                      trained_context=1024),
        Configuration("llama-2-7b", 4096, 32, 32, feed_forward=11008, gated=True,
                      vocabulary=32000, dtype="float16", trained_context=4096),
        Configuration("llama-3-8b", 4096, 32, 32, key_heads=8, feed_forward=14336, gated=True,
                      vocabulary=128256, trained_context=8192),
        Configuration("llama-3-70b", 8192, 64, 80, key_heads=8, feed_forward=28672, gated=True,
                      vocabulary=128256, trained_context=8192),
        Configuration("mistral-7b", 4096, 32, 32, key_heads=8, feed_forward=14336, gated=True,
                      vocabulary=32000, windows=(4096,), trained_context=32768),
        Configuration("mixtral-8x7b", 4096, 32, 32, key_heads=8, feed_forward=14336, gated=True,
                      experts=8, active_experts=2, vocabulary=32000, trained_context=32768),
        Configuration("gemma-2-9b", 3584, 16, 42, key_heads=8, head_width=256,
                      feed_forward=14336, gated=True, vocabulary=256000, tied=True,
                      windows=(4096, None), trained_context=8192),
        Configuration("qwen2.5-7b", 3584, 28, 28, key_heads=4, feed_forward=18944, gated=True,
                      vocabulary=152064, trained_context=131072),
        Configuration("phi-3-mini", 3072, 32, 32, feed_forward=8192, gated=True,
                      vocabulary=32064, windows=(2047,), trained_context=4096),
    )
}  # fmt: skip
"""gpt2, gpt2-xl; Llama-2-7b-hf; Meta-Llama-3-8B, -70B; Mistral-7B-v0.1 (its window is gone since
v0.2); Mixtral-8x7B-v0.1; gemma-2-9b (every other layer has a window); Qwen2.5-7B;
Phi-3-mini-4k-instruct."""


def preset(name: str) -> Configuration:
    """A well-known model by name.

    >>> preset("llama-3-8b").key_heads
    8
    """
    if not isinstance(name, str):
        raise RegardError("a model has a name", got=described(name), accepted=", ".join(PRESETS))
    found = PRESETS.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    raise RegardError(
        "unknown model",
        got=repr(name),
        accepted=", ".join(PRESETS) + "; or the path of a Hugging Face config.json",
        do=f"did you mean {near[0]}?" if near else "",
    )
