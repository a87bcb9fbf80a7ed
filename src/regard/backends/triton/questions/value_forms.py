"""What each head makes of each value: a quadratic form, and a product with a vector of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.backends.triton.arguments import sheet, sizes, tiles_of, wide
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import load_rows, product
from regard.inputs import AttentionInputs

KEYS = 64
WIDEST = 128
"""Of values whose matrix a program holds beside them."""


@launched
@triton.jit
def _value_forms(
    v, forms, vectors, out, n,
    E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """v·S·v and v·u for a tile of values under one head's S and their own u."""
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tl.program_id(0) * BN
    key, column = first + tl.arange(0, BN), tl.arange(0, BE)
    value = load_rows(v, b, h // n.group, first, n.keys, E, BE, BN, False)
    inside = (column[:, None] < E) & (column[None, :] < E)
    matrix = forms + h.to(tl.int64) * E * E + column[:, None] * E + column[None, :]
    bent = product(value, tl.load(matrix, mask=inside, other=0.0), None, "ieee")
    place = (b.to(tl.int64) * n.keys + key) * (n.heads * E) + h * E
    there = (key < n.keys)[:, None] & (column < E)[None, :]
    vector = tl.load(vectors + place[:, None] + column[None, :], mask=there, other=0.0)
    value = value.to(tl.float32)
    at = tl.program_id(1).to(tl.int64) * n.keys + key
    tl.store(out + at, tl.sum(bent * value, 1), mask=key < n.keys)
    after = tl.num_programs(1).to(tl.int64) * n.keys
    tl.store(out + after + at, tl.sum(vector.to(tl.float32) * value, 1), mask=key < n.keys)


def value_forms(
    x: AttentionInputs, forms: Float[Tensor, "h e e"], vectors: Float[Tensor, "b k inner"]
) -> tuple[Float[Tensor, "b h k"], Float[Tensor, "b h k"]]:
    """v·S·v of each value under each head's S, and v·u with vectors u for each key and head."""
    B, H, _, K = x.shape
    E = x.v.shape[-1]
    out = torch.empty(2, B, H, K, dtype=torch.float32, device=x.v.device)
    _value_forms[(tiles_of(K, KEYS), B * H)](
        sheet(x.v), forms.contiguous(), vectors.contiguous(), out, sizes(x),
        E=E, BE=wide(E), BN=KEYS, num_warps=4,
    )  # fmt: skip
    quadratic, linear = out
    return quadratic, linear
