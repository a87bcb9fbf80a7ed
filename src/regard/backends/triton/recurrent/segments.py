"""From what segments add, and what they do to a state, to the state that each begins with."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.pairs import product
from regard.backends.triton.recurrent.chunk import C, fading_at, load_state, store_state


@launched
@triton.jit
def carry_along(
    sums, turns, fading, first, begins, last, count, many, chunks, segments,
    M: tl.constexpr, E: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """What a segment does to a state is a matrix [M, M], the last columns of `turns`, or a decay.
    `sums` has W columns. Backwards states are gradients, and the matrix is turned over."""
    bg = tl.program_id(0)
    columns = tl.cdiv(E, BE)
    across, down = (tl.program_id(1) % columns) * BE, (tl.program_id(1) // columns) * BM
    m, e = down + tl.arange(0, BM)[:, None], across + tl.arange(0, BE)[None, :]
    state = tl.zeros((BM, BE), tl.float32)
    if first is not None:
        state = load_state(first, bg, m, e, M, E)
    for i in tl.range(0, segments, num_stages=1):
        s = segments - 1 - i if BACKWARDS else i
        at = bg.to(tl.int64) * segments + s
        store_state(begins, state, at, m, e, M, E)
        added = tl.where(e < E, load_state(sums, at, m, e, M, W), 0.0)
        if turns is not None:
            n = tl.arange(0, BM)[None, :]
            if BACKWARDS:
                turn = load_state(turns, at, n, E + m, M, E + M)
            else:
                turn = load_state(turns, at, m, E + n, M, E + M)
            state = product(turn, state, added, PRECISION)
        else:
            if fading is not None:
                for c in range(s * many, tl.minimum((s + 1) * many, chunks)):
                    whole, part = fading_at(fading, bg, c * C + C - 1, count)
                    state *= tl.exp2(whole + part)
            state += added
    store_state(last, state, bg, m, e, M, E)
