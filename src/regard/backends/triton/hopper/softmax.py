"""The softmax of a tile of products while more are to come, laid out as matrix units leave it.

Four threads share a row. Each adds up its own part of it, so that rows are whole only in the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.backends.triton.assembly import (
    RECIPROCAL,
    SHRINK_32,
    SHRINK_32_FORM,
    SHRINK_64,
    SHRINK_64_FORM,
)
from regard.backends.triton.pairs import ALIBI, FAINT, LOG2E, NO_BIAS, row_max

_row_max = gluon.jit(row_max.fn)


@gluon.jit
def own_sum(t):
    """What each of the four threads of a row holds of it, added up: [rows, 4]. They need not know
    of each other before the last tile. A thread waits for each addition of a chain, but not for
    those of three others."""
    rows: gl.constexpr = t.shape[0]
    eighth: gl.constexpr = t.shape[1] // 8
    by_thread = t.reshape((rows, eighth, 4, 2)).permute((0, 2, 1, 3))
    chains = by_thread.reshape((rows, 4, 4, eighth // 2))
    return gl.sum(gl.sum(chains, 3), 2)


@gluon.jit
def _beside(rows, own):
    """A number of each row, beside what its threads hold."""
    layout: gl.constexpr = gl.SliceLayout(1, own.type.layout)
    return gl.expand_dims(gl.convert_layout(rows, layout, assert_trivial=True), 1)


@gluon.jit
def whole_sum(own, LAYOUT: gl.constexpr):
    return gl.convert_layout(gl.sum(own, 1), gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def shrunk(mixed, shrink):
    """Sums of values, brought to the new largest logits. Warps without one go past it."""
    layout: gl.constexpr = gl.SliceLayout(1, mixed.type.layout)
    factor, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(shrink, layout), 1), mixed)
    if mixed.shape[1] == 64:
        return gl.inline_asm_elementwise(
            SHRINK_32, SHRINK_32_FORM, [mixed, factor], gl.float32, True, 32
        )
    else:
        return gl.inline_asm_elementwise(
            SHRINK_64, SHRINK_64_FORM, [mixed, factor], gl.float32, True, 64
        )


@gluon.jit
def logits(s, scoring, bias, slope, key, row, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """What the softmax is taken of, and the factor that makes logits of it, times log₂ e: products
    of queries with the keys from `key` on, or logits that are bent or moved."""
    if not scoring.capped and bias.kind == NO_BIAS:
        return s, scoring.scale * LOG2E
    else:
        factor = scoring.scale * LOG2E
        if scoring.capped:
            s = _tanh(s * (scoring.scale / scoring.cap))
            factor = scoring.cap * LOG2E
        if bias.kind == ALIBI:
            column = (key + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))).to(gl.float32)
            place = (row + bias.offset).to(gl.float32)
            far = gl.abs(gl.expand_dims(column, 0) - gl.expand_dims(place, 1))
            s = s * factor - slope * far
            factor = 1.0
        return s, factor


@gluon.jit
def _tanh(x):
    """1 - 2 / (e²ˣ + 1). Near 0 it cancels, and errs by some 10⁻⁷: times a cap that people choose,
    no more than products do. (A polynomial where all numbers of a warp are small spares powers, but
    took longer.)"""
    power = gl.exp2(x * (2 * LOG2E))
    return 1 - 2 * gl.inline_asm_elementwise(RECIPROCAL, "=f,f", [power + 1], gl.float32, True, 1)


@gluon.jit
def softmax(
    s, scale, largest, total, energy,
    STATISTICS: gl.constexpr, PARTIAL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Weights of a tile of products. The scale is above 0, so the largest product makes the largest
    logit, and scale and shift are one instruction."""
    here = gl.convert_layout(_row_max(s), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    highest = gl.maximum(largest, here * scale)
    x = s * scale - gl.expand_dims(highest, 1)
    p = gl.exp2(x)
    moved = largest - highest
    shrink = gl.exp2(moved)
    if STATISTICS:
        if PARTIAL:
            # Hidden pairs are 0, not 0 · ∞.
            x = gl.maximum(x, FAINT)
        energy = _beside(shrink, energy) * (energy + total * _beside(moved, energy))
        energy += own_sum(p * x)
    total = total * _beside(shrink, total) + own_sum(p)
    return p, shrink, highest, total, energy
