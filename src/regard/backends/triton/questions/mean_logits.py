"""The mean of each query's logits.

The sum of q·k over keys is q·(the sum of the keys). So keys are added up once, tile by tile, and a
query meets the sums of the tiles that it sees whole, and the keys of the others. Sums of tiles are
added for each tile of queries: under a window, a difference of two prefix sums would cancel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from regard.backends.triton.arguments import (
    added,
    constants_of,
    score,
    sheet,
    sizes,
    tiles_of,
    wide,
)
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import LN2, LOG2E, load_rows, logits_of, product
from regard.backends.triton.questions.answers import Memory
from regard.backends.triton.rules import allowed, full_at, keys_for, part_at
from regard.backends.triton.settings.tuning import Looking
from regard.inputs import AttentionInputs

MANY = tl.constexpr(16)
"""Sums that are loaded at once."""


@launched
@triton.jit
def _sums_of_keys(k, sums, keys, groups, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """The sum of a tile of keys."""
    b, g = tl.program_id(1) // groups, tl.program_id(1) % groups
    ks = load_rows(k, b, g, tl.program_id(0) * BN, keys, D, BD, BN, False)
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + at * BD + tl.arange(0, BD), tl.sum(ks.to(tl.float32), 0))


@launched
@triton.jit
def _mean_logits(
    q, k, sums, mean, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mean of the logits of a tile of queries. Without sums every key is looked at."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tile * BM
    last = tl.minimum(first + BM, n.queries) - 1
    row = first + tl.arange(0, BM)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    full, part, limit, path = keys_for(rule, n, b, h, tile, first, last, BN)
    total = tl.zeros((BM,), tl.float32)
    count = tl.zeros((BM,), tl.float32)
    looked = 0
    if sums is not None:
        tiles = (n.keys + BN - 1) // BN
        mine = (b * (n.heads // n.group) + h // n.group).to(tl.int64) * tiles
        column = tl.arange(0, BD)
        # Many at a time, so that loads do not wait for each other.
        every = tl.zeros((MANY, BD), tl.float32)
        for i in range(0, full, MANY):
            some = i + tl.arange(0, MANY)
            start = full_at(rule, path, tl.minimum(some, full - 1), BN)
            at = sums + (mine + start // BN)[:, None] * BD + column[None, :]
            every += tl.load(at, mask=(some < full)[:, None], other=0.0)
        keys = tl.sum(every, 0)[None, :]
        total = tl.sum(qs.to(tl.float32) * keys, 1) * (scoring.scale * LOG2E)
        count += (full * BN).to(tl.float32)
        looked = full
        # Pair by pair, a logit of minus infinity is as good as hidden, and others count.
        if tl.max((tl.abs(total) < float("inf")).to(tl.int32) ^ 1, 0) > 0:
            total = tl.zeros((BM,), tl.float32)
            count = tl.zeros((BM,), tl.float32)
            looked = 0
    for i in range(looked, full + part):
        table = 0
        if i < full:
            start = full_at(rule, path, i, BN)
        else:
            start, table = part_at(rule, path, i - full, BN)
        key = start + tl.arange(0, BN)
        ks = load_rows(k, b, h // n.group, start, n.keys, D, BD, BN, False)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, key[None, :], n)
        seen = (key < n.keys)[None, :] & (place < n.queries)
        if i >= full:
            seen &= allowed(rule, place, key[None, :], limit, table, BM, BN)
        # A bias of minus infinity hides a pair as well.
        hidden = (s == float("-inf")) | (seen ^ True)
        total += tl.sum(tl.where(hidden, 0.0, s), 1)
        count += tl.sum(tl.where(hidden, 0.0, 1.0), 1)
    found = tl.where(count > 0, total * LN2 / tl.maximum(count, 1.0), float("-inf"))
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    tl.store(mean + at, found, mask=row < n.queries)


def mean_logits(x: AttentionInputs, how: Looking) -> Memory:
    """The mean of each query's logits; with what settings is said. Then scratch memory."""
    B, H, Q, K = x.shape
    G = x.k.shape[1]
    mean = torch.empty(B, H, Q, dtype=torch.float32, device=x.q.device)
    constants = constants_of(x, how.rows, how.keys, how.precision)
    sums = None
    if x.bias is None and x.softcap is None:
        sums = mean.new_empty(B, G, tiles_of(K, how.keys), wide(x.k.shape[-1]))
        sizes_of_keys = {name: constants[name] for name in ("D", "BD", "BN")}
        _sums_of_keys[(sums.shape[2], B * G)](sheet(x.k), sums, K, G, **sizes_of_keys, num_warps=4)
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
    _mean_logits[(tiles_of(Q, how.rows), B * H)](
        sheet(x.q), sheet(x.k), sums, mean, rule, added(x), score(x), sizes(x), **constants,
        num_warps=4, num_stages=how.stages,
    )  # fmt: skip
    return (mean,) if sums is None else (mean, sums)
