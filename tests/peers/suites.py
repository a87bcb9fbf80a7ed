"""Which of the peers' tests run, and what is put into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "gpt2", "gpt_neox",
    "opt", "bert", "roberta", "distilbert", "electra", "bart", "t5", "whisper", "vit", "clip",
    "gpt_oss", "deepseek_v3", "qwen2_vl", "llava",
)  # fmt: skip
"""Decoders with grouped heads, windows, soft-caps, experts, sinks, latent keys; encoders; both;
speech and images, by themselves and beside text."""

BACKENDS = ("reference", "tiled", "sdpa")
"""Those that run without a card. FlexAttention is Inductor's here: minutes for each new shape."""

_ABOUT = (
    "attention or eager_matches or generate or decoding or cache or batching or padding or outputs "
    "or retain_grad or hidden_states or checkpointing or inputs_embeds or test_training or "
    "problem_types"
)
# What compiles, exports, loads, or starts other processes takes longest and says nothing more.
_WITHOUT = (
    "compil", "export", "fsdp", "tp_", "overfit", "pipeline", "offload", "save_load", "reload",
    "flash", "flex", "parallel", "sdpa_kernels", "continuous_batching", "quantized", "features",
    "longform",
)  # fmt: skip
ATTENTION = f"({_ABOUT}) and not ({' or '.join(_WITHOUT)})"

# Minutes each on a CPU without instructions for half precision: its backward pass most of all. The
# same tests run with fewer pairs.
_LONG = ("large_seq_len", "batch_size_12", "seq_len_1030", "(causal_variants and not shape3)")
# The compiler traces what is put in, and TorchScript cannot hold it.
_COMPILED = ("compile", "script")


@dataclass(frozen=True)
class Variant:
    """A way to put regard into a suite: plugins of ours, and what they are told."""

    name: str
    plugins: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Tests of a peer that run once as they are, and once in each variant."""

    name: str
    checkout: Path
    arguments: Sequence[str]
    variants: Sequence[Variant]


WATCHED = Variant("watched", ("every_forward_watched",))
BY_NAME = Variant("by name", ("named_implementation",))
VARIANTS = {variant.name: variant for variant in (WATCHED, BY_NAME)}
"""How regard is put into transformers."""


def transformers(
    checkout: Path, families: Sequence[str], variants: Sequence[str] = tuple(VARIANTS)
) -> Iterator[Suite]:
    chosen = [VARIANTS[name] for name in variants]
    for family in families:
        file = f"tests/models/{family}/test_modeling_{family}.py"
        yield Suite(family, checkout, (file, "-k", ATTENTION), chosen)


def pytorch(checkout: Path, backends: Sequence[str]) -> Iterator[Suite]:
    variants = [
        Variant(name, ("attention_by_regard",), {"REGARD_PEERS_BACKEND": name}) for name in backends
    ]
    # Their conftest is written for one version of pytest.
    quiet = ("--noconftest", "-k", f"not ({' or '.join(_LONG + _COMPILED)})")
    for file in ("test/test_transformers.py", "test/nn/test_multihead_attention.py"):
        yield Suite(Path(file).stem, checkout, (*quiet, file), variants)
