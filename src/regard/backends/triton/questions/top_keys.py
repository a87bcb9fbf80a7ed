"""The strongest keys of each query, found in two passes over its keys.

The first pass keeps, for each query and each column of a tile, the largest logit that stood there:
a comparison and two selections a pair, without a branch. The strongest of these columns are the
first list. What the list can lack is a key that shares its column with a stronger one, so the
second pass only looks for those above the weakest of the list. With 64 columns and n = 8 a query
has about half such a key (64 · ln(64 / 56) - 8), whatever the length; neighbours, which strong keys
often are, never share a column. Keeping a sorted list in one pass instead inserts
n · ln(keys / n) + n keys a query, some 60 of 16,000, one after the other, while all other queries
of the tile wait.

Among equal logits the earlier key counts as the stronger one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Top
from regard.backends.triton.arguments import added, constants_of, score, sheet, sizes, tiles_of
from regard.backends.triton.hopper.octets import ROWS as ROWS_ON_HOPPER
from regard.backends.triton.hopper.top_keys import MOST as MOST_ON_HOPPER
from regard.backends.triton.hopper.top_keys import marks_on_hopper, top_keys_on_hopper
from regard.backends.triton.launches.launched import launched, together
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import load_rows, logits_of, norms, product
from regard.backends.triton.questions.answers import Memory
from regard.backends.triton.rules import allowed, full_at, keys_for, part_at
from regard.backends.triton.settings.tuning import Looking, fits_hopper
from regard.inputs import AttentionInputs

BEYOND = tl.constexpr(2**31 - 1)
"""No key."""
MOST = 64
"""Keys that a list may hold."""


@triton.jit
def _taken(best, where, s, key, weakest, many, BT: tl.constexpr):
    """The list of each query with what it lacks of a tile, and the weakest logit in it."""
    slot = tl.arange(0, BT)[None, :]
    strongest = tl.max(s, 1)
    while tl.max(((strongest >= weakest) & (strongest > float("-inf"))).to(tl.int32), 0) > 0:
        # Of each query, the strongest key that the tile has left.
        at = tl.min(tl.where(s == strongest[:, None], key, BEYOND), 1)
        # The weakest of the list is the last of those with its logit.
        lowest = (best == weakest[:, None]) & (slot < many)
        late = tl.max(tl.where(lowest, where, -1), 1)
        free = tl.max(tl.where(lowest & (where == late[:, None]), slot, -1), 1)
        takes = (strongest > weakest) | ((strongest == weakest) & (at < late))
        here = takes[:, None] & (slot == free[:, None])
        best = tl.where(here, strongest[:, None], best)
        where = tl.where(here, at[:, None], where)
        weakest = tl.min(tl.where(slot < many, best, float("inf")), 1)
        # What is not taken is behind all of the list, and so is the rest of the tile.
        gone = (takes[:, None] ^ True) | (key == at[:, None])
        s = tl.where(gone, float("-inf"), s)
        strongest = tl.max(s, 1)
    return best, where, weakest


@launched
@triton.jit
def _top_keys(
    q, k, lse, values, indices, marks, rule, bias, scoring, n, many,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, MARKED: tl.constexpr,
):  # fmt: skip
    """The strongest keys of a tile of queries, in order; with `marks`, only of queries in tiles of
    MARKED that are marked."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    g = h // n.group
    first = tile * BM
    last = tl.minimum(first + BM, n.queries) - 1
    row = first + tl.arange(0, BM)
    wanted = row < n.queries
    if marks is not None:
        of_head = marks + tl.program_id(1).to(tl.int64) * tl.cdiv(n.queries, MARKED)
        wanted = tl.load(of_head + row // MARKED, mask=wanted, other=0) != 0
        if tl.max(wanted.to(tl.int32), 0) == 0:
            return
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    column = tl.arange(0, BN)[None, :]
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    full, part, limit, path = keys_for(rule, n, b, h, tile, first, last, BN)

    high = tl.full((BM, BN), float("-inf"), tl.float32)
    since = tl.full((BM, BN), -1, tl.int32)
    for i in tl.range(full, num_stages=STAGES):
        start = full_at(rule, path, i, BN)
        ks = load_rows(k, b, g, start, n.keys, D, BD, BN, True)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, start + column, n)
        higher = s > high
        high = tl.where(higher, s, high)
        since = tl.where(higher, start, since)
    for i in tl.range(part, num_stages=STAGES):
        start, table = part_at(rule, path, i, BN)
        ks = load_rows(k, b, g, start, n.keys, D, BD, BN, False)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, start + column, n)
        seen = allowed(rule, place, start + column, limit, table, BM, BN)
        seen &= (start + column < n.keys) & (place < n.queries)
        # Tiles do not come in the order of keys.
        higher = seen & ((s > high) | ((s == high) & (start < since)))
        high = tl.where(higher, s, high)
        since = tl.where(higher, start, since)

    slot = tl.arange(0, BT)[None, :]
    best = tl.full((BM, BT), float("-inf"), tl.float32)
    where = tl.full((BM, BT), -1, tl.int32)
    for i in range(many):
        strongest = tl.max(high, 1)[:, None]
        left = (high == strongest) & (high > float("-inf"))
        at = tl.min(tl.where(left, since + column, BEYOND), 1)[:, None]
        here = (slot == i) & (at < BEYOND)
        best = tl.where(here, strongest, best)
        where = tl.where(here, at, where)
        high = tl.where(since + column == at, float("-inf"), high)
    weakest = tl.min(tl.where(slot < many, best, float("inf")), 1)

    for i in tl.range(full, num_stages=STAGES):
        start = full_at(rule, path, i, BN)
        ks = load_rows(k, b, g, start, n.keys, D, BD, BN, True)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, start + column, n)
        s = tl.where(since == start, float("-inf"), s)
        best, where, weakest = _taken(best, where, s, start + column, weakest, many, BT)
    for i in tl.range(part, num_stages=STAGES):
        start, table = part_at(rule, path, i, BN)
        ks = load_rows(k, b, g, start, n.keys, D, BD, BN, False)
        s = product(qs, ks.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, start + column, n)
        seen = allowed(rule, place, start + column, limit, table, BM, BN)
        seen &= (start + column < n.keys) & (place < n.queries) & (since != start)
        s = tl.where(seen, s, float("-inf"))
        best, where, weakest = _taken(best, where, s, start + column, weakest, many, BT)

    at_row = tl.program_id(1).to(tl.int64) * n.queries + row
    norm = norms(lse, at_row, row < n.queries)
    for i in range(many):
        strongest = tl.max(best, 1)
        at = tl.min(tl.where(best == strongest[:, None], where, BEYOND), 1)
        weight = tl.where(at < 0, 0.0, tl.exp2(strongest - norm))
        tl.store(values + at_row * many + i, weight, mask=wanted)
        tl.store(indices + at_row * many + i, at.to(tl.int64), mask=wanted)
        gone = where == at[:, None]
        best = tl.where(gone, float("-inf"), best)
        where = tl.where(gone, -1, where)


def runs_on_hopper(x: AttentionInputs, many: int) -> bool:
    """Whether the kernel for Hopper takes such lists, and a tile of queries is full enough."""
    plain = x.bias is None and x.softcap is None
    small = many <= MOST_ON_HOPPER and x.q.shape[-1] <= 128
    return plain and small and x.shape.Q > 64 and fits_hopper(x)


MARKS = 2
"""The place of memory that starts at 0."""


def top_keys(x: AttentionInputs, how: Looking, lse: Float[Tensor, "b h q"], many: int) -> Memory:
    """The strongest keys of each query, `MOST` at most; with what settings is said. Values and
    indices, then scratch memory."""
    B, H, Q, _ = x.shape
    values = lse.new_empty(B, H, Q, many)
    indices = torch.empty_like(values, dtype=torch.int64)
    to = Top(values, indices)
    if not runs_on_hopper(x, many):
        _by_any_card(x, how, lse, many, to, None)
        return to
    marks = torch.zeros(marks_on_hopper(x), dtype=torch.int32, device=x.q.device)
    with together():
        scratch = top_keys_on_hopper(x, lse, many, to, marks)
        _by_any_card(x, how, lse, many, to, marks[1:])
    return *to, marks, *scratch


def _by_any_card(
    x: AttentionInputs,
    how: Looking,
    lse: Float[Tensor, "b h q"],
    many: int,
    to: Top,
    marks: Tensor | None,
) -> None:
    B, H, Q, _ = x.shape
    # Few queries leave most of a large tile empty.
    rows = min(how.rows, max(16, 1 << (Q - 1).bit_length()))
    rule = rule_of(x.mask, x.shape, (rows, how.keys), x.q.device, by_keys=False)
    # Behind the kernel for Hopper, one for lists of up to 8 keys and one for longer ones.
    least = 2 if marks is None else 8
    _top_keys[(tiles_of(Q, rows), B * H)](
        sheet(x.q), sheet(x.k), lse, *to, marks, rule, added(x), score(x), sizes(x), many,
        **constants_of(x, rows, how.keys, how.precision),
        BT=max(least, 1 << (many - 1).bit_length()), STAGES=how.stages, MARKED=ROWS_ON_HOPPER,
        # Two programs share a multiprocessor, so that one compares while products of the other
        # run, if their lists are short.
        num_warps=8 if rows >= 128 else 4, num_stages=how.stages,
        maxnreg=128 if rows >= 128 and many <= 16 else None,
    )  # fmt: skip
