"""The triangular system of the delta rule within a chunk.

What is written of token i is β_i (x_i - Σ_j<i d_ij k_i·k_j written_j), with x the value less what
the state before the chunk says of its key, and d what is left of j at i. So (I + L) written = β x
with L_ij = β_i d_ij k_i·k_j. This is the inverse of I + L, in blocks of 16: those on the diagonal
row by row, the others from them. (Powers of L would be fewer products, but they grow like binomial
coefficients where keys are alike, and cancel.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.feature_maps import load_part, operand
from regard.backends.triton.pairs import product
from regard.backends.triton.recurrent.chunk import C, fade_pairs, numbers_at

BLOCK = tl.constexpr(16)


@triton.jit
def _products(k, b, g, i, j, start, count, M: tl.constexpr, BM: tl.constexpr,
              NARROW: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Keys of block i times keys of block j."""
    found = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in tl.static_range(0, M, BM):
        one, _one = load_part(k, b, g, start + i * BLOCK, count, first, M, BM, BLOCK)
        other, _other = load_part(k, b, g, start + j * BLOCK, count, first, M, BM, BLOCK)
        found = product(operand(one, NARROW), operand(other, NARROW).T, found, PRECISION)
    return found


@triton.jit
def _below(k, beta, fading, b, g, bg, i, j, start, count, M: tl.constexpr, BM: tl.constexpr,
           NARROW: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """A block of L below the diagonal."""
    found = _products(k, b, g, i, j, start, count, M, BM, NARROW, PRECISION)
    row = start + i * BLOCK + tl.arange(0, BLOCK)
    column = start + j * BLOCK + tl.arange(0, BLOCK)
    return (
        fade_pairs(found, fading, bg, row, column, count, False)
        * (numbers_at(beta, bg, row, count)[:, None])
    )


@triton.jit
def _with_row(found, below, at):
    """The inverse of a block on the diagonal with one more row; `below` is turned over."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    own = tl.sum(tl.where(column == at, below, 0.0), 1)
    new = tl.sum(own[:, None] * found, 0)
    return tl.where(row == at, found - new[None, :], found)


@triton.jit
def _keep(solved, x, bg, i, j, start, count):
    row = start + i * BLOCK + tl.arange(0, BLOCK)
    at = (bg.to(tl.int64) * count + row)[:, None] * C + j * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(solved + at, x.to(solved.dtype.element_ty), mask=(row < count)[:, None])


@launched
@triton.jit
def corrections(
    k, beta, fading, solved, count, groups,
    M: tl.constexpr, BM: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(I + L)⁻¹ of one chunk, [C, C]."""
    bg, start = tl.program_id(1), tl.program_id(0) * C
    b, g = bg // groups, bg % groups
    l00 = _below(k, beta, fading, b, g, bg, 0, 0, start, count, M, BM, NARROW, PRECISION).T
    l11 = _below(k, beta, fading, b, g, bg, 1, 1, start, count, M, BM, NARROW, PRECISION).T
    l22 = _below(k, beta, fading, b, g, bg, 2, 2, start, count, M, BM, NARROW, PRECISION).T
    l33 = _below(k, beta, fading, b, g, bg, 3, 3, start, count, M, BM, NARROW, PRECISION).T
    one = tl.where(tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :], 1.0, 0.0)
    r00, r11, r22, r33 = one, one, one, one
    for at in range(1, BLOCK):
        # Side by side, since each waits for its row before.
        r00 = _with_row(r00, l00, at)
        r11 = _with_row(r11, l11, at)
        r22 = _with_row(r22, l22, at)
        r33 = _with_row(r33, l33, at)
    _keep(solved, r00, bg, 0, 0, start, count)
    _keep(solved, r11, bg, 1, 1, start, count)
    _keep(solved, r22, bg, 2, 2, start, count)
    _keep(solved, r33, bg, 3, 3, start, count)

    l10 = _below(k, beta, fading, b, g, bg, 1, 0, start, count, M, BM, NARROW, PRECISION)
    l21 = _below(k, beta, fading, b, g, bg, 2, 1, start, count, M, BM, NARROW, PRECISION)
    l32 = _below(k, beta, fading, b, g, bg, 3, 2, start, count, M, BM, NARROW, PRECISION)
    r10 = -product(r11, product(l10, r00, None, PRECISION), None, PRECISION)
    r21 = -product(r22, product(l21, r11, None, PRECISION), None, PRECISION)
    r32 = -product(r33, product(l32, r22, None, PRECISION), None, PRECISION)
    _keep(solved, r10, bg, 1, 0, start, count)
    _keep(solved, r21, bg, 2, 1, start, count)
    _keep(solved, r32, bg, 3, 2, start, count)

    l20 = _below(k, beta, fading, b, g, bg, 2, 0, start, count, M, BM, NARROW, PRECISION)
    l31 = _below(k, beta, fading, b, g, bg, 3, 1, start, count, M, BM, NARROW, PRECISION)
    both = product(l21, r10, product(l20, r00, None, PRECISION), PRECISION)
    r20 = -product(r22, both, None, PRECISION)
    both = product(l32, r21, product(l31, r11, None, PRECISION), PRECISION)
    r31 = -product(r33, both, None, PRECISION)
    _keep(solved, r20, bg, 2, 0, start, count)
    _keep(solved, r31, bg, 3, 1, start, count)

    l30 = _below(k, beta, fading, b, g, bg, 3, 0, start, count, M, BM, NARROW, PRECISION)
    both = product(l31, r10, product(l30, r00, None, PRECISION), PRECISION)
    both = product(l32, r20, both, PRECISION)
    _keep(solved, -product(r33, both, None, PRECISION), bg, 3, 0, start, count)

    nothing = tl.zeros((BLOCK, BLOCK), tl.float32)
    _keep(solved, nothing, bg, 0, 1, start, count)
    _keep(solved, nothing, bg, 0, 2, start, count)
    _keep(solved, nothing, bg, 0, 3, start, count)
    _keep(solved, nothing, bg, 1, 2, start, count)
    _keep(solved, nothing, bg, 1, 3, start, count)
    _keep(solved, nothing, bg, 2, 3, start, count)
