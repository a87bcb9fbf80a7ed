"""stories15M, a small Llama that tells children's stories, from the file llama2.c keeps it in."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from tests.real.packages import STORIES

MODEL_BYTES = 60_816_028


def stories(implementation: str = "eager") -> Any:
    """The model as transformers' own, with every number of the file in its place."""
    import transformers

    data = STORIES.read("package/dist/llama2.data")[:MODEL_BYTES]
    d, hidden, layers, heads, key_heads, vocabulary, length = struct.unpack("<7i", data[:28])
    numbers = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32)
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        size = torch.Size(shape).numel()
        at += size
        return numbers[at - size : at].view(shape)

    def rotated(w: Tensor) -> Tensor:
        # llama2.c turns neighbouring numbers, transformers the two halves of a head.
        return w.view(layers, heads, -1, 2, d).transpose(2, 3).reshape(layers, d, d)

    weights = {"model.embed_tokens.weight": take(vocabulary, d)}
    parts = {
        "input_layernorm": take(layers, d),
        "self_attn.q_proj": rotated(take(layers, d, d)),
        "self_attn.k_proj": rotated(take(layers, d, d)),
        "self_attn.v_proj": take(layers, d, d),
        "self_attn.o_proj": take(layers, d, d),
        "post_attention_layernorm": take(layers, d),
        "mlp.gate_proj": take(layers, hidden, d),
        "mlp.down_proj": take(layers, d, hidden),
        "mlp.up_proj": take(layers, hidden, d),
    }
    for name, stack in parts.items():
        weights |= {f"model.layers.{i}.{name}.weight": w for i, w in enumerate(stack)}
    weights["model.norm.weight"] = take(d)
    take(2, length, d // heads // 2)  # cosines and sines of the rotation
    assert at == len(numbers)
    assert heads == key_heads
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=d, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=length, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    kind = transformers.LlamaForCausalLM
    model = kind._from_config(config, attn_implementation=implementation).eval()
    model.load_state_dict(weights)
    return model


def pieces() -> list[str]:
    """The text of each token."""
    data = STORIES.read("package/dist/llama2.data")[MODEL_BYTES:]
    found, at = [], 4
    while at < len(data):
        (size,) = struct.unpack_from("<i", data, at + 4)
        found.append(data[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return found
