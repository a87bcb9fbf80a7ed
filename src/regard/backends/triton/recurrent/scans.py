"""From chunk to chunk: the state, and backwards its gradient.

    written = R β (v - reads k S)          S' = carried S + (into k)ᵀ written

with R the inverse of `corrections`; without the delta rule, what is written is v. Backwards, with g
the gradient of the output and `local` that of `written` through the chunk's own outputs,

    z = Rᵀ (local + into k dS')            dS = carried dS' + (reads q)ᵀ g - (β reads k)ᵀ z

and dv = β z. Segments of chunks are gone along side by side: first from a state of 0, for what
each adds, then from the state it begins with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.feature_maps import operand, store_part
from regard.backends.triton.pairs import product
from regard.backends.triton.recurrent.chunk import (
    C,
    left_at,
    left_at_end,
    left_of_each,
    load_chunk,
    load_state,
    numbers_at,
    store_state,
)


@triton.jit
def _begin(first, at, m, e, M: tl.constexpr, E: tl.constexpr):
    """The state that a segment begins with: one that is given, or 0. Behind its E columns comes the
    matrix I, which becomes what the segment does to a state."""
    if first is None:
        state = tl.where((e - E == m) & (m < M), 1.0, 0.0)
    else:
        state = load_state(first, at, m, e, M, E)
    return state


@launched
@triton.jit
def states_along(
    k, v, beta, fading, solved, first, states, written, last, count, groups, many, chunks,
    M: tl.constexpr, E: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A segment of `many` chunks, and BM × BE entries of its state (all rows, with the delta
    rule). `states` takes the state before each chunk and after the last, if it is there. The state
    at the end has W columns: E, or with what the segment does to a state E + M."""
    s, bg = tl.program_id(0), tl.program_id(1)
    columns = tl.cdiv(W, BE)
    across, down = (tl.program_id(2) % columns) * BE, (tl.program_id(2) // columns) * BM
    b, g = bg // groups, bg % groups
    m, e = down + tl.arange(0, BM)[:, None], across + tl.arange(0, BE)[None, :]
    own = bg * tl.num_programs(0) + s
    state = _begin(first, own, m, e, M, E)
    stop = tl.minimum((s + 1) * many, chunks)
    for c in tl.range(s * many, stop, num_stages=STAGES):
        start = c * C
        row = start + tl.arange(0, C)
        if states is not None:
            store_state(states, state, bg.to(tl.int64) * (chunks + 1) + c, m, e, M, E)
        ks = load_chunk(k, b, g, start, count, down, M, BM)
        ks = operand(ks, NARROW)
        new = load_chunk(v, b, g, start, count, across, E, BE).to(tl.float32)
        if fading is not None:
            reads, into = left_at(fading, bg, start, count), left_of_each(fading, bg, start, count)
        if solved is not None:
            known = product(ks, operand(state, NARROW), None, PRECISION)
            if fading is not None:
                known *= reads[:, None]
            new = (new - known) * numbers_at(beta, bg, row, count)[:, None]
            inverse = load_chunk(solved, b, g, start, count, 0, C, C)
            new = product(operand(inverse, NARROW), operand(new, NARROW), None, PRECISION)
            if written is not None:
                store_part(written, new, b, g, start, count, across, E, BE, C)
        if fading is not None:
            state *= left_at_end(fading, bg, start, count)
            new *= into[:, None]
        state = product(ks.T, operand(new, NARROW), state, PRECISION)
    if states is not None:
        if stop == chunks:
            store_state(states, state, bg.to(tl.int64) * (chunks + 1) + chunks, m, e, M, E)
    store_state(last, state, own, m, e, M, W)


@launched
@triton.jit
def gradients_along(
    q, k, g, beta, fading, solved, local, first, behind, corrected, dv, last, scale, count, groups,
    many, chunks, GROUP: tl.constexpr,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same, backwards: the gradient of a state behind each chunk, and of that before all."""
    s, bg = tl.program_id(0), tl.program_id(1)
    columns = tl.cdiv(E, BE)
    across, down = (tl.program_id(2) % columns) * BE, (tl.program_id(2) // columns) * BM
    b, c = bg // groups, bg % groups
    m, e = down + tl.arange(0, BM)[:, None], across + tl.arange(0, BE)[None, :]
    own = bg * tl.num_programs(0) + s
    pull = _begin(first, own, m, e, M, E)
    stop = tl.minimum((s + 1) * many, chunks)
    for i in tl.range(0, stop - s * many, num_stages=STAGES):
        chunk = stop - 1 - i
        start = chunk * C
        row = start + tl.arange(0, C)
        if behind is not None:
            store_state(behind, pull, bg.to(tl.int64) * chunks + chunk, m, e, M, E)
        wide = operand(pull, NARROW)
        if fading is not None:
            reads, into = left_at(fading, bg, start, count), left_of_each(fading, bg, start, count)
            pull *= left_at_end(fading, bg, start, count)
        if solved is not None:
            ks = load_chunk(k, b, c, start, count, down, M, BM)
            ks = operand(ks, NARROW)
            found = product(ks, wide, None, PRECISION)
            if fading is not None:
                found *= into[:, None]
            own_part = load_chunk(local, b, c, start, count, across, E, BE)
            found += own_part.to(tl.float32)
            inverse = load_chunk(solved, b, c, start, count, 0, C, C)
            found = product(operand(inverse, NARROW).T, operand(found, NARROW), None, PRECISION)
            if corrected is not None:
                store_part(corrected, found, b, c, start, count, across, E, BE, C)
            found *= numbers_at(beta, bg, row, count)[:, None]
            if corrected is not None:
                store_part(dv, found, b, c, start, count, across, E, BE, C)
            if fading is not None:
                found *= reads[:, None]
            pull = product(ks.T, operand(-found, NARROW), pull, PRECISION)
        for r in tl.static_range(GROUP):
            h = c * GROUP + r
            qs = load_chunk(q, b, h, start, count, down, M, BM)
            gs = load_chunk(g, b, h, start, count, across, E, BE)
            gs = gs.to(tl.float32) * scale
            if fading is not None:
                gs *= reads[:, None]
            pull = product(operand(qs, NARROW).T, operand(gs, NARROW), pull, PRECISION)
    store_state(last, pull, own, m, e, M, E)
