"""The lengths of the longest query and key, which tell whether float32 is exact enough: PyTorch's
reductions of so many short rows read at a tenth of the memory's speed."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from regard.backends.triton.arguments import sheet, tiles_of, wide
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import load_rows
from regard.backends.triton.refusals import MOST
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.transforms import transformed, unobserved

WORTH = 1 << 22
"""Numbers in queries, and in keys, from which on reductions take longer than anything else about
them: below, no kernel need be compiled."""
WIDEST = 256


@launched
@triton.jit
def _longest(t, found, heads, rows, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """Raise a number to the largest squared length of a tile of rows. Those of numbers that are not
    negative are in the order of their bits."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    tile = load_rows(t, b, h, tl.program_id(0) * BM, rows, D, BD, BM, False).to(tl.float32)
    squared = tl.sum(tile * tile, 1)
    # What is no number is not less than any, and must not be lost.
    squared = tl.where(squared < float("inf"), squared, float("inf"))
    tl.atomic_max(found, tl.max(squared, 0).to(tl.int32, bitcast=True), sem="relaxed")


def squared_lengths(x: AttentionInputs) -> Int[Tensor, "2 4"]:
    """The largest squared lengths of queries and keys, in float32, as their bits: the first of each
    row, which starts where kernels find aligned memory. One that overflows, or of no number, is
    infinite."""
    found = torch.zeros(2, 4, dtype=torch.int32, device=x.q.device)
    for i, t in enumerate((x.q, x.k)):
        B, H, N, D = t.shape
        rows = 16384 // wide(D)
        _longest[(tiles_of(N, rows), B * H)](
            sheet(t), found[i], H, N, D=D, BD=wide(D), BM=rows, num_warps=4
        )
    return found


def kind_of_lengths(x: AttentionInputs) -> Any:
    """What the launches depend on; None where they are not for this call."""
    q, k = x.q, x.k
    if type(x.comparison) is not Dot or min(q.numel(), k.numel()) < WORTH:
        return None
    if q.dtype == torch.float64 or q.shape[-1] > WIDEST or x.shape.B * x.shape.H > MOST:
        return None
    if not q.is_cuda or q.get_device() != torch.cuda.current_device():
        return None
    if transformed((q, k)) or not unobserved((q, k)) or torch.cuda.is_current_stream_capturing():
        return None
    return (
        "lengths", q.get_device(), q.shape, q.stride(), q.dtype, q.data_ptr() % 16,
        k.shape, k.stride(), k.dtype, k.data_ptr() % 16,
    )  # fmt: skip


def told_by(x: AttentionInputs, found: Int[Tensor, "2 4"]) -> float | None:
    """A bound on what is added up for a logit, as `largest_sum` gives; None where float32 does not
    tell. Waits for the device."""
    assert isinstance(x.comparison, Dot)
    squared = math.prod(found[:, 0].view(torch.float32).tolist())
    return abs(x.comparison.scale) * math.sqrt(squared) if math.isfinite(squared) else None
