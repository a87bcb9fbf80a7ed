"""Which tiles the kernels run with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends.triton.arguments import tiles_of, wide
from regard.backends.triton.settings.cards import card_of

PROGRAMS = 264
"""Programs that keep a large GPU busy while each goes from chunk to chunk."""
SHORTEST = 16
"""Chunks of a segment at least."""
FEWEST = 3
"""Segments from which on the delta rule gains by them: it goes along each two or three times."""

WIDEST_TURN = 128
"""Columns of keys up to which what a segment does to a state, a square matrix, fits a program."""
ROOM = 160_000
"""Bytes of shared memory from which on chunks 128 wide are loaded ahead."""


class Tiles(NamedTuple):
    """How a call is computed."""

    narrow: bool
    """Whether products are made of bfloat16 numbers."""
    precision: str
    roomy: bool
    """Whether the card has the shared memory of the largest ones."""

    @property
    def held(self) -> torch.dtype:
        """The type of what one kernel leaves to the next."""
        return torch.bfloat16 if self.narrow else torch.float32

    def _constants(self, M: int, E: int, BM: int, BE: int, warps: int) -> dict[str, Any]:
        return {
            "M": M, "E": E, "BM": min(BM, wide(M)), "BE": min(BE, wide(E)), "NARROW": self.narrow,
            "PRECISION": self.precision, "num_warps": warps,
        }  # fmt: skip

    def of_states(self, M: int, E: int, *, whole: bool) -> dict[str, Any]:
        """Kernels that go from chunk to chunk, with all rows of a state or a block of them."""
        if not whole:
            side = 64 if self.narrow else 32
            return self._constants(M, E, side, side, 4) | {"STAGES": 3 if self.narrow else 1}
        columns = 32 if wide(M) <= 128 else 16
        stages = 3 if self.narrow and wide(M) <= (128 if self.roomy else 64) else 1
        return self._constants(M, E, wide(M), columns, 4) | {"STAGES": stages}

    def of_values(self, M: int, E: int) -> dict[str, Any]:
        """Kernels of a block of values' columns."""
        return self._constants(M, E, *((64, 64) if self.narrow else (32, 32)), 4)

    def of_features(self, M: int, E: int) -> dict[str, Any]:
        """Kernels of a block of queries' and keys' columns. (Eight warps share a product of 64 rows
        and 16 columns in TF32 wrongly, on Hopper with Triton 3.6.)"""
        return self._constants(M, E, *((128, 64, 8) if self.narrow else (32, 32, 4)))

    def of_corrections(self, M: int) -> dict[str, Any]:
        found = self._constants(M, M, 64, 64, 1)
        return {name: found[name] for name in ("M", "BM", "NARROW", "PRECISION", "num_warps")}


def tiles_for(q: Tensor, v: Tensor) -> Tiles:
    """float16 is multiplied in TF32, which has as many digits: sums of products overflow it."""
    roomy = card_of(q.device).shared >= ROOM
    if q.dtype == v.dtype == torch.bfloat16:
        return Tiles(True, "tf32", roomy)
    half = torch.float16 in (q.dtype, v.dtype) and q.dtype != torch.float32
    return Tiles(False, "tf32" if half else "tf32x3" if q.shape[-1] > 32 else "ieee", roomy)


def segment_of(chunks: int, programs: int, width: int, *, delta: bool) -> int:
    """Chunks that one program goes along, of so many programs for every segment."""
    if delta and width > WIDEST_TURN:
        return chunks
    segments = max(PROGRAMS // programs, 1)
    many = max(tiles_of(chunks, segments), SHORTEST)
    if delta and tiles_of(chunks, many) < FEWEST:
        return chunks
    return many
