"""Which tiles the kernels run with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends.triton.arguments import tiles_of, wide

PROGRAMS = 528
"""Programs that keep a large GPU busy: four for each multiprocessor of an H200."""
SHORTEST, LONGEST = 128, 2048
"""Tokens of a segment. Each begins with a state: longer ones take less memory."""


class Tiles(NamedTuple):
    """Sizes of one call."""

    rows: int
    """Tokens that are taken together."""
    columns: int
    """Columns of a state that one program holds."""
    warps: int
    stages: int
    narrow: bool
    """Whether products are made of bfloat16 numbers."""
    precision: str

    def constants(self, M: int, E: int, *, features: bool) -> dict[str, Any]:
        """What a kernel is compiled for, whose programs take a block of features, or of values."""
        BM, BE = wide(M), wide(E)
        if features:
            BM = min(BM, self.columns)
        else:
            BE = min(BE, self.columns)
        return {
            "M": M, "E": E, "BM": BM, "BE": BE, "BN": self.rows, "NARROW": self.narrow,
            "PRECISION": self.precision, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


def tiles_for(q: Tensor, v: Tensor) -> Tiles:
    """In float16 products of features would overflow: such calls are computed in TF32, which has as
    many digits."""
    widest = max(wide(q.shape[-1]), wide(v.shape[-1]))
    if q.dtype == v.dtype == torch.bfloat16:
        return Tiles(64 if widest <= 128 else 32, 64, 4, 2, True, "tf32")
    half = torch.float16 in (q.dtype, v.dtype) and q.dtype != torch.float32
    precision = "tf32" if half else "tf32x3" if q.shape[-1] > 32 else "ieee"
    return Tiles(32 if widest <= 128 else 16, 32, 4, 1, False, precision)


def segment_of(length: int, programs: int, rows: int) -> int:
    """Tokens that one program goes along, of so many programs for every segment."""
    asked = -(-length * programs // PROGRAMS)
    size = 1 << max(asked - 1, 1).bit_length()
    return max(rows, min(max(size, SHORTEST), LONGEST))


def segments_of(length: int, segment: int) -> int:
    return tiles_of(length, segment)
