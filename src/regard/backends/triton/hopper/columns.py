"""Columns of numbers beside the values, which the forward pass on Hopper mixes by the same weights.

They measure how much weight keys of a kind get, and how far back it falls, in the pass that runs
anyway. Only sums over all rows are written.

Weights are rounded here as they are for the values. One column holds ones: divided by what comes of
it, the rounded weights of each row are shares of 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from regard.backends.triton.arguments import tiles_of

COLUMNS = gl.constexpr(16)
"""The fewest that products take with memory laid out for the copy engine."""
MOST = (COLUMNS.value - 1) // 2
"""The most columns at once: each is split into two of half precision, which hold it to 16 bits."""
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=4)


class Beside(NamedTuple):
    """Columns as the kernel reads them, and memory for the sums of each half of a tile of rows."""

    columns: Float[Tensor, "b h k 16"]
    sums: Float[Tensor, "b h halves 16"]

    @staticmethod
    def of(
        columns: Float[Tensor, "b h k c"], dtype: torch.dtype, queries: int, rows: int
    ) -> Beside:
        B, H, K, many = columns.shape
        halves = columns.new_zeros(B, H, K, COLUMNS.value, dtype=dtype)
        halves[..., 0] = 1
        halves[..., 1 : many + 1] = columns
        rest = columns - halves[..., 1 : many + 1]
        halves[..., many + 1 : 2 * many + 1] = rest
        sums = columns.new_empty(
            B, H, 2 * tiles_of(queries, rows), COLUMNS.value, dtype=torch.float32
        )
        return Beside(halves, sums)

    def described(self, keys: int) -> Any:
        c = self.columns
        tile = [1, 1, keys, COLUMNS.value]
        return TensorDescriptor(c, list(c.shape), list(c.stride()), tile, _LAYOUT)

    def total(self, many: int) -> Float[Tensor, "b h c"]:
        """What all rows together have of each of so many columns."""
        total = self.sums.sum(2, dtype=torch.float64)
        return total[..., 1 : many + 1] + total[..., many + 1 : 2 * many + 1]


@gluon.jit
def no_columns(HALF: gl.constexpr):
    """What rows have of the columns before any key."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros((HALF, COLUMNS), gl.float32, LAYOUT)


@gluon.jit
def mix_columns(p, columns, shrink, beside, BN: gl.constexpr):
    """The product of weights with the columns of a tile of keys, under way."""
    LAYOUT: gl.constexpr = beside.type.layout
    factor = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT)), 1)
    weights = gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2))
    return warpgroup_mma(weights, columns.reshape((BN, COLUMNS)), beside * factor, is_async=True)


@gluon.jit
def add_up_rows(half, tile, b, h, n, beside, sums, BM: gl.constexpr):
    """Write what a group's rows have of the columns, added up. Rows that see nothing have 0."""
    LAYOUT: gl.constexpr = beside.type.layout
    HALF: gl.constexpr = BM // 2
    row = tile * BM + half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    ones = gl.sum(gl.where(gl.expand_dims(column, 0) == 0, beside, 0.0), 1)
    inverse = gl.where((ones == 0) | (row >= n.queries), 0.0, 1.0 / ones)
    total = gl.sum(beside * gl.expand_dims(inverse, 1), 0)
    tiles = (n.queries + BM - 1) // BM
    at = ((b * n.heads + h).to(gl.int64) * tiles + tile) * 2 + half
    gl.store(sums + at * COLUMNS + column, total)
