"""What queries give to the keys at each offset, and to keys of their own kind, such as the same
token: sums that scores of heads are made of.

Both look at few of the pairs. Offsets are a narrow band; keys of a kind lie together once keys are
sorted by kind, and so do the queries that ask for them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends.questions.matching_keys import MatchingKeys
from regard.backends.triton.arguments import added, constants_of, score, sheet, sizes, tiles_of
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import load_rows, logits_of, norms, product
from regard.backends.triton.rules import allowed, limit_of, runs_of
from regard.backends.triton.settings.tuning import Looking
from regard.inputs import AttentionInputs

DIAGONAL = 32
"""Keys that a diagonal is wide."""
PROGRAMS = 64
"""Programs that share the rows of a head, each with a sum of its own."""


@triton.jit
def _gathered(sheet, b, h, place, inside, width: tl.constexpr, WIDE: tl.constexpr):
    """Rows of a tensor that lie anywhere, [places, WIDE]; 0 for those that are not there."""
    column = tl.arange(0, WIDE)[None, :]
    base = sheet.ptr + b.to(tl.int64) * sheet.batch + h.to(tl.int64) * sheet.head
    at = base + place.to(tl.int64)[:, None] * sheet.row + column
    return tl.load(at, mask=inside[:, None] & (column < width), other=0.0)


@triton.jit
def _weights_of(qs, ks, norm, place, key, seen, bias, scoring, n, b, h, PRECISION: tl.constexpr):
    """The weights of a tile of pairs, 0 where they are not seen. Places that are not there come
    as 0."""
    s = product(qs, ks.T, None, PRECISION)
    heads = (h + tl.zeros_like(place))[:, None]
    s, _ = logits_of(s, scoring, bias, b, heads, place[:, None], key[None, :], n)
    p = tl.exp2(tl.where(seen, s, float("-inf")) - norm[:, None])
    return tl.where(seen, p, 0.0)


@launched
@triton.jit
def _offset_sums(
    q, k, lse, out, rule, bias, scoring, n, shift, reach,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One of the diagonals that are BM keys wide, along some rows of a head: the sum of each of
    its own diagonals. A tile is as broad as tall, and its keys move along with its rows."""
    step, part = tl.program_id(2), tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    limit = limit_of(rule, n, b)
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    # Turned by its number, each row has the same distance in the same column; what comes round
    # belongs to the diagonal before.
    turned = (row[:, None] + column[None, :]) % BN
    round_again = row[:, None] + column[None, :] >= BN
    here = tl.zeros((BN,), tl.float32)
    before = tl.zeros((BN,), tl.float32)
    for tile in range(part, (n.queries + BM - 1) // BM, tl.num_programs(0)):
        first = tile * BM
        place = first + row
        key = first + shift - reach + step * BN + column
        there = (key >= 0) & (key < n.keys)
        key = tl.where(there, key, 0)
        qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
        ks = _gathered(k, b, h // n.group, key, there, D, BD)
        norm = norms(lse, tl.program_id(1).to(tl.int64) * n.queries + place, place < n.queries)
        seen = allowed(rule, place[:, None], key[None, :], limit, runs_of(rule, b, h), BM, BN)
        seen &= (place < n.queries)[:, None] & there[None, :]
        p = _weights_of(qs, ks, norm, place, key, seen, bias, scoring, n, b, h, PRECISION)
        slanted = tl.gather(p, turned, 1)
        here += tl.sum(tl.where(round_again, 0.0, slanted), 0)
        before += tl.sum(tl.where(round_again, slanted, 0.0), 0)
    # Each in a plane of its own, at its place among all diagonals.
    width = (tl.num_programs(2) + 1) * BN
    plane = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * width
    at = (tl.program_id(1) * tl.num_programs(0) + part).to(tl.int64) * width + step * BN
    tl.store(out + at + column, before)
    tl.store(out + plane + at + BN + column, here)


@launched
@triton.jit
def _matching_mass(
    q, k, lse, mass, met, rows, begins, ends, keys, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What some queries give to the keys of their kind, which are `begins` to `ends` of the sorted
    `keys`; and how many of them they see. Queries that ask for nothing are not written."""
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    at = b.to(tl.int64) * n.queries + slot
    begin = tl.load(begins + at, mask=slot < n.queries, other=0)
    end = tl.load(ends + at, mask=slot < n.queries, other=0)
    asks = end > begin
    start = tl.min(tl.where(asks, begin, n.keys), 0)
    stop = tl.max(tl.where(asks, end, 0), 0)
    if start < stop:
        place = tl.load(rows + at, mask=asks, other=0)
        limit = limit_of(rule, n, b)
        qs = _gathered(q, b, h, place, asks, D, BD)
        norm = norms(lse, tl.program_id(1).to(tl.int64) * n.queries + place, asks)
        total = tl.zeros((BM,), tl.float32)
        many = tl.zeros((BM,), tl.int32)
        for first in range(start, stop, BN):
            found = first + tl.arange(0, BN)
            key = tl.load(keys + b.to(tl.int64) * n.keys + found, mask=found < stop, other=0)
            ks = _gathered(k, b, h // n.group, key, found < stop, D, BD)
            seen = allowed(rule, place[:, None], key[None, :], limit, runs_of(rule, b, h), BM, BN)
            seen &= (found[None, :] >= begin[:, None]) & (found[None, :] < end[:, None])
            p = _weights_of(qs, ks, norm, place, key, seen, bias, scoring, n, b, h, PRECISION)
            total += tl.sum(p, 1)
            many += tl.sum(seen.to(tl.int32), 1)
        tl.store(mass + tl.program_id(1).to(tl.int64) * n.queries + place, total, mask=asks)
        if h == 0:
            tl.store(met + b.to(tl.int64) * n.queries + place, many, mask=asks)


def offset_sums(
    x: AttentionInputs, how: Looking, lse: Float[Tensor, "b h q"], reach: int
) -> Float[Tensor, "b h offsets"]:
    """What all queries give to the key at each offset, from `reach` places later to as many
    earlier."""
    B, H, Q, K = x.shape
    side = min(how.rows, how.keys, DIAGONAL)
    assert reach % side == 0
    steps, parts = 2 * reach // side + 1, min(PROGRAMS, tiles_of(Q, side))
    # Distances from `side` keys before the first column of the first step to as many behind the
    # last one's.
    out = torch.zeros(2, B * H, parts, (steps + 1) * side, dtype=torch.float32, device=x.q.device)
    rule = rule_of(x.mask, x.shape, (side, side), x.q.device, by_keys=False)
    _offset_sums[(parts, B * H, steps)](
        sheet(x.q), sheet(x.k), lse.contiguous(), out, rule, added(x), score(x), sizes(x), K - Q,
        reach, **constants_of(x, side, side, how.precision), num_warps=2,
    )  # fmt: skip
    total = out.sum((0, 2), dtype=torch.float64)
    return total[:, side : side + 2 * reach + 1].flip(-1).view(B, H, -1)


def matching_mass(
    x: AttentionInputs, how: Looking, lse: Float[Tensor, "b h q"], matches: MatchingKeys
) -> tuple[Float[Tensor, "b h q"], Bool[Tensor, "b q"]]:
    """What each query gives to the keys whose kind it asks for, and whether it sees any."""
    B, H, Q, _ = x.shape
    mass = torch.zeros(B, H, Q, dtype=torch.float32, device=x.q.device)
    met = torch.zeros(B, Q, dtype=torch.int32, device=x.q.device)
    # Most tokens are few, and so are their keys.
    rows, keys = min(how.rows, 64), min(how.keys, 32)
    rule = rule_of(x.mask, x.shape, (rows, keys), x.q.device, by_keys=False)
    _matching_mass[(tiles_of(Q, rows), B * H)](
        sheet(x.q), sheet(x.k), lse.contiguous(), mass, met, matches.rows, matches.begins,
        matches.ends, matches.keys, rule, added(x), score(x), sizes(x),
        **constants_of(x, rows, keys, how.precision), num_warps=4,
    )  # fmt: skip
    return mass, met > 0
