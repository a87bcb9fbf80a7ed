"""Gradients of queries, keys, decays and rates, chunk by chunk.

With w what is written, z its gradient before rates (see `scans`), d the decay from one token to
another, S the state before a chunk and dS' the gradient of that behind it:

    dq_i = scale (reads_i S g_i + Σ_j≤i d_ij (g_i·w_j) k_j)
    dk_j = into_j dS' w_j + Σ_i≥j d_ij (scale (g_i·w_j) q_i - β_i (z_i·w_j) k_i)    as it is written
    ρ_i  = -reads_i S z_i - Σ_j<i d_ij (z_i·w_j) k_j                                as it is read

A key's gradient is dk + β ρ; that of its rate is z·v + k·ρ. A decay to token i multiplies what q_i
and k_i read, and divides what k_i writes, as long as the chunk lasts; behind it, the state. So the
logarithm of decay t has the gradient Σ_i≥t (q_i·dq_i + β_i k_i·ρ_i - k_i·dk_i) + S'·dS'.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.backends.triton.launches.launched import launched
from regard.backends.triton.linear.feature_maps import operand, store_part
from regard.backends.triton.pairs import LOG2E, product
from regard.backends.triton.recurrent.chunk import (
    GONE,
    C,
    fade_pairs,
    left_at,
    left_of_each,
    load_chunk,
    load_state,
    numbers_at,
)


@launched
@triton.jit
def query_and_key_gradients(
    q, k, v, g, beta, fading, written, corrected, states, behind, dq, dk, rates, fades, ends, scale,
    count, groups, group, chunks,
    M: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk, and a block of BM columns of queries and keys. `rates`, `fades` and `ends` take
    the block's part of k·ρ (and z·v), of a token's sum above, and of S'·dS'."""
    c, bg, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    down = block * BM
    b, own = bg // groups, bg % groups
    start = c * C
    row = start + tl.arange(0, C)
    m = down + tl.arange(0, BM)
    before = bg.to(tl.int64) * (chunks + 1) + c
    pairs = tl.zeros((C, C), tl.float32)
    writes, reading = tl.zeros((C, BM), tl.float32), tl.zeros((C, BM), tl.float32)
    rate, end = tl.zeros((C,), tl.float32), tl.zeros((BM,), tl.float32)
    for first in tl.range(0, E, BE, num_stages=1):
        e = first + tl.arange(0, BE)
        new = load_chunk(written, b, own, start, count, first, E, BE)
        new = operand(new, NARROW)
        pull = load_state(behind, bg.to(tl.int64) * chunks + c, m[:, None], e[None, :], M, E)
        writes = product(new, operand(pull, NARROW).T, writes, PRECISION)
        if fading is not None:
            after = load_state(states, before + 1, m[:, None], e[None, :], M, E).to(tl.float32)
            end += tl.sum(after * pull.to(tl.float32), 1)
        if corrected is not None:
            zs = load_chunk(corrected, b, own, start, count, first, E, BE)
            vs = load_chunk(v, b, own, start, count, first, E, BE)
            rate += tl.sum(zs.to(tl.float32) * vs.to(tl.float32), 1)
            zs = operand(zs, NARROW)
            state = operand(load_state(states, before, m[:, None], e[None, :], M, E), NARROW)
            reading = product(zs, state.T, reading, PRECISION)
            pairs = product(zs, new.T, pairs, PRECISION)
    ks = load_chunk(k, b, own, start, count, down, M, BM)
    wide_k, ks = ks.to(tl.float32), operand(ks, NARROW)
    if fading is not None:
        reads, into = left_at(fading, bg, start, count), left_of_each(fading, bg, start, count)
        writes *= into[:, None]
        reading *= reads[:, None]
    betas = tl.zeros((C,), tl.float32)
    if corrected is not None:
        pairs = fade_pairs(pairs, fading, bg, row, row, count, False)
        reading = -product(operand(pairs, NARROW), ks, reading, PRECISION)
        betas = numbers_at(beta, bg, row, count)
        turned = operand(-pairs * betas[:, None], NARROW).T
        writes = product(turned, ks, writes, PRECISION)
    fade = tl.zeros((C,), tl.float32)
    for r in tl.range(0, group, num_stages=1):
        h = own * group + r
        pulls, found = tl.zeros((C, C), tl.float32), tl.zeros((C, BM), tl.float32)
        for first in tl.range(0, E, BE, num_stages=1):
            e = first + tl.arange(0, BE)
            gs = load_chunk(g, b, h, start, count, first, E, BE)
            new = load_chunk(written, b, own, start, count, first, E, BE)
            state = operand(load_state(states, before, m[:, None], e[None, :], M, E), NARROW)
            gs = operand(gs, NARROW)
            pulls = product(gs, operand(new, NARROW).T, pulls, PRECISION)
            found = product(gs, state.T, found, PRECISION)
        if fading is not None:
            found *= reads[:, None]
        pulls = operand(fade_pairs(pulls, fading, bg, row, row, count, True) * scale, NARROW)
        found = product(pulls, ks, found * scale, PRECISION)
        store_part(dq, found, b, h, start, count, down, M, BM, C)
        qs = load_chunk(q, b, h, start, count, down, M, BM)
        writes = product(pulls.T, operand(qs, NARROW), writes, PRECISION)
        fade += tl.sum(qs.to(tl.float32) * found, 1)
    store_part(dk, writes + betas[:, None] * reading, b, own, start, count, down, M, BM, C)
    part = block.to(tl.int64) * tl.num_programs(1) + bg
    at = part * count + row
    read = tl.sum(wide_k * reading, 1)
    if corrected is not None:
        tl.store(rates + at, read + tl.where(block == 0, rate, 0.0), mask=row < count)
    if fading is not None:
        fade += betas * read - tl.sum(wide_k * writes, 1)
        tl.store(fades + at, fade, mask=row < count)
        tl.store(ends + part * chunks + c, tl.sum(end, 0))


@launched
@triton.jit
def decay_gradients(log_decay, fades, ends, d_decay, count, chunks, blocks):
    """Gradients of the logarithms of decays of one chunk."""
    c, bg = tl.program_id(0), tl.program_id(1)
    row = c * C + tl.arange(0, C)
    fade, end = tl.zeros((C,), tl.float32), 0.0
    for block in range(blocks):
        part = block * tl.num_programs(1) + bg
        fade += numbers_at(fades, part, row, count)
        end += tl.load(ends + part.to(tl.int64) * chunks + c)
    found = tl.cumsum(fade, 0, reverse=True) + end
    # Of what is gone, nothing is learned.
    left = numbers_at(log_decay, bg, row, count) * LOG2E > GONE
    at = bg.to(tl.int64) * count + row
    found = tl.where(left, found, 0.0).to(d_decay.dtype.element_ty)
    tl.store(d_decay + at, found, mask=row < count)
