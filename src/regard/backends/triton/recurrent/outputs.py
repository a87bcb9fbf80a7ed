"""The kernels that go over chunks in parallel once their states are known."""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.feature_maps import operand, store_part
from regard.backends.triton.pairs import product
from regard.backends.triton.recurrent.chunk import (
    C,
    fade_pairs,
    left_at,
    left_of_each,
    load_chunk,
    load_state,
)


@launched
@triton.jit
def outputs(
    q, k, written, fading, states, out, scale, count, heads, group, chunks,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale (reads q S + (faded q kᵀ) written): one chunk, and a block of BE columns."""
    c, across = tl.program_id(0), tl.program_id(2) * BE
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    g = h // group
    bg = b * (heads // group) + g
    start = c * C
    row = start + tl.arange(0, C)
    at = bg.to(tl.int64) * (chunks + 1) + c
    mixed = tl.zeros((C, BE), tl.float32)
    weights = tl.zeros((C, C), tl.float32)
    for first in tl.range(0, M, BM, num_stages=1):
        qs = load_chunk(q, b, h, start, count, first, M, BM)
        ks = load_chunk(k, b, g, start, count, first, M, BM)
        m, e = first + tl.arange(0, BM), across + tl.arange(0, BE)
        state = operand(load_state(states, at, m[:, None], e[None, :], M, E), NARROW)
        qs = operand(qs, NARROW)
        mixed = product(qs, state, mixed, PRECISION)
        weights = product(qs, operand(ks, NARROW).T, weights, PRECISION)
    if fading is not None:
        reads = left_at(fading, bg, start, count)
        mixed *= reads[:, None]
    weights = fade_pairs(weights, fading, bg, row, row, count, True)
    new = load_chunk(written, b, g, start, count, across, E, BE)
    mixed = product(operand(weights, NARROW), operand(new, NARROW), mixed, PRECISION)
    store_part(out, mixed * scale, b, h, start, count, across, E, BE, C)


@launched
@triton.jit
def value_gradients(
    q, k, g, fading, behind, dv, scale, count, groups, group, chunks,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(faded k qᵀ) g, and into k dS' if `behind`, dS', is there: the gradient of what is written in
    one chunk, and a block of BE columns."""
    c, bg, across = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BE
    b, own = bg // groups, bg % groups
    start = c * C
    row = start + tl.arange(0, C)
    found = tl.zeros((C, BE), tl.float32)
    if behind is not None:
        for first in tl.range(0, M, BM, num_stages=1):
            ks = load_chunk(k, b, own, start, count, first, M, BM)
            m, e = first + tl.arange(0, BM), across + tl.arange(0, BE)
            at = bg.to(tl.int64) * chunks + c
            pull = operand(load_state(behind, at, m[:, None], e[None, :], M, E), NARROW)
            found = product(operand(ks, NARROW), pull, found, PRECISION)
        if fading is not None:
            into = left_of_each(fading, bg, start, count)
            found *= into[:, None]
    for r in tl.range(0, group, num_stages=1):
        h = own * group + r
        weights = tl.zeros((C, C), tl.float32)
        for first in tl.range(0, M, BM, num_stages=1):
            qs = load_chunk(q, b, h, start, count, first, M, BM)
            ks = load_chunk(k, b, own, start, count, first, M, BM)
            weights = product(operand(qs, NARROW), operand(ks, NARROW).T, weights, PRECISION)
        weights = fade_pairs(weights, fading, bg, row, row, count, True) * scale
        gs = load_chunk(g, b, h, start, count, across, E, BE)
        found = product(operand(weights, NARROW).T, operand(gs, NARROW), found, PRECISION)
    store_part(dv, found, b, own, start, count, across, E, BE, C)
