"""Feature maps inside kernels, and tiles of what they give."""

from __future__ import annotations

import triton
import triton.language as tl

AS_IT_IS = tl.constexpr(0)
ELU = tl.constexpr(1)
RELU = tl.constexpr(2)


@triton.jit
def operand(x, NARROW: tl.constexpr):
    """A tile as products take it: bfloat16, or float32. (Sums of features overflow float16.)"""
    return x.to(tl.bfloat16) if NARROW else x.to(tl.float32)


@triton.jit
def mapped(x, MAP: tl.constexpr):
    """Features. NaN stays NaN."""
    x = x.to(tl.float32)
    if MAP == ELU:
        x = tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == RELU:
        x = tl.where(x < 0, 0.0, x)
    return x


@triton.jit
def slope(x, MAP: tl.constexpr):
    """The derivative of a feature map."""
    x = x.to(tl.float32)
    found = tl.zeros_like(x) + 1.0
    if MAP == ELU:
        found = tl.where(x > 0, 1.0, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == RELU:
        found = tl.where(x > 0, 1.0, 0.0)
    return found


@triton.jit
def load_features(
    sheet, b, h, start, count, first, width: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr,
    MAP: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """N rows of features from column `first` on, as an operand; 0 past `count` rows and past the
    width, where a map may give something else."""
    x, inside = load_part(sheet, b, h, start, count, first, width, WIDE, N)
    return operand(tl.where(inside, mapped(x, MAP), 0.0), NARROW)


@triton.jit
def load_part(
    sheet, b, h, start, count, first, width: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr
):
    """N rows from `start` and columns from `first` on, and which are there."""
    row, column = start + tl.arange(0, N), first + tl.arange(0, WIDE)
    base = sheet.ptr + b.to(tl.int64) * sheet.batch + h.to(tl.int64) * sheet.head
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = base + row.to(tl.int64)[:, None] * sheet.row + column[None, :]
    return tl.load(at, mask=inside, other=0.0), inside


@triton.jit
def load_operand(
    sheet, b, h, start, count, width: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """N whole rows, as they are."""
    x, _ = load_part(sheet, b, h, start, count, 0, width, WIDE, N)
    return operand(x, NARROW)


@triton.jit
def count_of(limits, keys, b):
    """How many keys of a batch entry there are."""
    if limits is not None:
        keys = tl.minimum(tl.load(limits + b).to(tl.int32), keys)
    return keys


@triton.jit
def store_part(
    sheet, x, b, h, start, count, first, width: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr
):
    """Write N rows from `start` and columns from `first` on."""
    row, column = start + tl.arange(0, N), first + tl.arange(0, WIDE)
    base = sheet.ptr + b.to(tl.int64) * sheet.batch + h.to(tl.int64) * sheet.head
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = base + row.to(tl.int64)[:, None] * sheet.row + column[None, :]
    tl.store(at, x.to(sheet.ptr.dtype.element_ty), mask=inside)
