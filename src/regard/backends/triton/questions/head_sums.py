"""What the rows of each head add up to, for whoever follows training: one launch for a call.

One program loops over the rows of a head. Where a mask hides only what comes after a query, the
mean of its logits is q·(the sum of the keys it sees) / (how many they are). From one row to the
next one key more is seen, so that a program adds up keys as it goes: O(n) for a head, no pair is
looked at but those with the first key, and nothing is written but the sums.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import HEAD_SUMS, Rows
from regard.backends.triton.arguments import on_card, score, sheet, sizes, wide
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import finite_only, load_rows
from regard.backends.triton.rules import BAND
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.transforms import transformed

ROUNDING = tl.constexpr(4 * torch.finfo(torch.float32).eps)
"""By so much of its size a logit may differ from one pass to another."""
EVERYTHING = (-math.inf, math.inf)
"""The band of no mask."""


@triton.jit
def _keys(k, b, g, key, count, D: tl.constexpr, BD: tl.constexpr):
    """Some keys of a head, 0 for those that are not there or not finite: who sees such a key is not
    asked for a mean."""
    column = tl.arange(0, BD)[None, :]
    base = k.ptr + b.to(tl.int64) * k.batch + g.to(tl.int64) * k.head
    inside = ((key >= 0) & (key < count))[:, None] & (column < D)
    at = base + key.to(tl.int64)[:, None] * k.row + column
    return finite_only(tl.load(at, mask=inside, other=0.0)).to(tl.float32)


@launched
@triton.jit
def _head_sums(
    q, k, out, lse, max_logit, entropy, sums, rule, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of one head of one batch entry, in the order of HEAD_SUMS."""
    head = tl.program_id(0)
    b, h = head // n.heads, head % n.heads
    g = h // n.group
    place = tl.arange(0, BM)
    base = head.to(tl.int64) * n.queries
    column = tl.arange(0, BD)
    at = k.ptr + b.to(tl.int64) * k.batch + g.to(tl.int64) * k.head + column
    first_key = tl.load(at, mask=column < D, other=0.0).to(tl.float32)

    # What the row before the first would see.
    known = n.keys
    if rule.kind == BAND:
        known = tl.minimum(rule.high, n.keys)
    before = tl.zeros((BD,), tl.float32)
    for start in tl.range(0, known, BM, num_stages=STAGES):
        before += tl.sum(_keys(k, b, g, start + place, known, D, BD), 0)

    empty = tl.zeros((BM,), tl.float32)
    broken = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    spread = tl.zeros((BM,), tl.float32)
    share = tl.zeros((BM,), tl.float32)
    mean = tl.zeros((BM,), tl.float32)
    room = tl.zeros((BM,), tl.float32)
    energy = tl.zeros((BM,), tl.float32)
    non_finite = tl.zeros((BM,), tl.float32)
    infinite = tl.zeros((BM,), tl.float32)
    for tile in tl.range((n.queries + BM - 1) // BM, num_stages=STAGES):
        first = tl.minimum(tile * BM, n.queries)
        row = first + place
        inside = row < n.queries
        top = tl.load(max_logit + base + row, mask=inside, other=float("-inf"))
        norm = tl.load(lse + base + row, mask=inside, other=0.0)
        size = tl.abs(top)
        # A row that sees something, and nothing broken.
        sound = size < float("inf")
        nothing = top == float("-inf")
        empty += tl.where(inside & nothing, 1.0, 0.0)
        broken += tl.where(sound | nothing, 0.0, 1.0)
        infinite += tl.where(top == float("inf"), 1.0, 0.0)
        largest = tl.maximum(largest, tl.where(sound, top, float("-inf")))
        spread += tl.where(sound, tl.load(entropy + base + row, mask=inside, other=0.0), 0.0)

        outs = load_rows(out, b, h, first, n.queries, E, BE, BM, False).to(tl.float32)
        square = tl.sum(outs * outs, 1)
        whole = square < float("inf")
        energy += tl.where(sound & whole, square, 0.0)
        non_finite += tl.where((sound | nothing) & whole, 0.0, 1.0)

        # As `seen.statistics.share` has it.
        qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
        own = qs.to(tl.float32)
        below = tl.sum(own * first_key[None, :], 1) * scoring.scale - top
        below = tl.where(below + ROUNDING * size >= 0, 0.0, below)
        share += tl.where(sound, tl.exp(top - norm + below), 0.0)

        many = n.keys + 0 * row
        seen_keys = before[None, :] + tl.zeros((BM, BD), tl.float32)
        if rule.kind == BAND:
            many = tl.minimum(tl.maximum(row + rule.high + 1, 0), n.keys)
            # The last key that each row sees, if there is one.
            ks = _keys(k, b, g, row + rule.high, n.keys, D, BD)
            seen_keys += tl.cumsum(ks, 0)
            before += tl.sum(ks, 0)
        total = tl.sum(own * seen_keys, 1)
        seen = tl.maximum(many, 1).to(tl.float32)
        mean += tl.where(sound, total * scoring.scale / seen, 0.0)
        room += tl.where(sound, tl.log(seen), 0.0)

    to = sums + head
    step = tl.num_programs(0)
    tl.store(to, n.queries.to(tl.float32))
    tl.store(to + step, tl.sum(empty, 0))
    tl.store(to + 2 * step, tl.sum(broken, 0))
    tl.store(to + 3 * step, tl.max(largest, 0))
    tl.store(to + 4 * step, tl.sum(spread, 0))
    tl.store(to + 5 * step, tl.sum(share, 0))
    tl.store(to + 6 * step, tl.sum(mean, 0))
    tl.store(to + 7 * step, tl.sum(room, 0))
    # Without a learned sink, the first key is all there is of one.
    tl.store(to + 8 * step, tl.sum(share, 0))
    tl.store(to + 9 * step, tl.sum(energy, 0) / E)
    tl.store(to + 10 * step, tl.sum(non_finite, 0))
    tl.store(to + 11 * step, tl.sum(infinite, 0))


def kind_of_sums(x: AttentionInputs, rows: Rows) -> Hashable | None:
    """What the launch for a call depends on; None where the kernel does not tell its sums: where
    logits are more than scaled products, or a mask hides some of what came before."""
    if x.bias is not None or x.softcap is not None or x.sink is not None:
        return None
    if type(x.comparison) is not Dot:
        return None
    band = EVERYTHING if x.mask is None else x.mask.band()
    q, k, (out, lse, max_logit, entropy) = x.q, x.k, rows
    if band is None or band[0] > 1 - q.shape[2] or transformed((q, k, out)):
        return None
    return (
        "sums", q.get_device(), band, x.comparison.scale,
        q.shape, q.stride(), q.dtype, q.data_ptr() % 16,
        k.shape, k.stride(), k.data_ptr() % 16,
        out.shape, out.stride(), out.dtype, out.data_ptr() % 16,
        lse.stride(), lse.dtype, lse.data_ptr() % 16,
        max_logit.stride(), max_logit.data_ptr() % 16, entropy.stride(), entropy.data_ptr() % 16,
    )  # fmt: skip


def memory_for_sums(x: AttentionInputs) -> Float[Tensor, "n b h"]:
    return torch.empty((len(HEAD_SUMS), *x.shape[:2]), dtype=torch.float32, device=x.q.device)


def tile_of(x: AttentionInputs, rows: Rows) -> tuple[int, int]:
    """How many rows a tile has, and how many tiles are loaded ahead: what fits into the shared
    memory of any card, and into registers."""
    width = max(wide(x.q.shape[-1]), wide(rows.out.shape[-1]))
    size = width * x.q.element_size()
    side = 64 if size <= 128 else 32 if size <= 512 else 16
    return side, 3 if size <= 256 else 2


def sums_of_heads(x: AttentionInputs, rows: Rows) -> Float[Tensor, "n b h"]:
    """The sums of a call that the kernel takes."""
    side, stages = tile_of(x, rows)
    D, E = x.q.shape[-1], rows.out.shape[-1]
    sums = memory_for_sums(x)
    rule = rule_of(x.mask, x.shape, (side, side), x.q.device, by_keys=False)
    with on_card(sums):
        _head_sums[(x.shape.B * x.shape.H,)](
            sheet(x.q), sheet(x.k), sheet(rows.out), rows.lse.contiguous(),
            rows.max_logit.contiguous(), rows.entropy.contiguous(), sums, rule, score(x), sizes(x),
            D=D, BD=wide(D), E=E, BE=wide(E), BM=side, STAGES=stages, num_warps=8,
            num_stages=stages,
        )  # fmt: skip
    return sums
