"""What each key received: a program owns a tile of keys and sums over the queries."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from regard.backends.triton.arguments import added, constants_of, score, sheet, sizes, tiles_of
from regard.backends.triton.hopper.received import received_on_hopper
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import load_rows, logits_of, norms, product
from regard.backends.triton.questions.answers import Memory
from regard.backends.triton.rules import allowed, full_at, part_at, rows_for
from regard.backends.triton.settings.tuning import Looking, fits_hopper
from regard.inputs import AttentionInputs


@launched
@triton.jit
def _received(
    q, k, lse, out, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a tile of keys got from all queries of one head. Keys are rows."""
    tile = tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tile * BN
    last = tl.minimum(first + BN, n.keys) - 1
    key = first + tl.arange(0, BN)
    ks = load_rows(k, b, h // n.group, first, n.keys, D, BD, BN, False)
    total = tl.zeros((BN,), tl.float32)
    full, part, limit, path = rows_for(rule, n, b, h, tile, first, last, BM)
    base = tl.program_id(1).to(tl.int64) * n.queries
    for i in tl.range(full, num_stages=STAGES):
        start = full_at(rule, path, i, BM)
        row = start + tl.arange(0, BM)
        qs = load_rows(q, b, h, start, n.queries, D, BD, BM, True)
        norm = norms(lse, base + row, row < n.queries)
        heads = (h + tl.zeros_like(row))[None, :]
        s = product(ks, qs.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, row[None, :], key[:, None], n)
        total += tl.sum(tl.exp2(s - norm[None, :]), 1)
    for i in tl.range(part, num_stages=STAGES):
        start, table = part_at(rule, path, i, BM)
        row = start + tl.arange(0, BM)
        qs = load_rows(q, b, h, start, n.queries, D, BD, BM, False)
        norm = norms(lse, base + row, row < n.queries)
        heads = (h + tl.zeros_like(row))[None, :]
        s = product(ks, qs.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, row[None, :], key[:, None], n)
        seen = allowed(rule, row[None, :], key[:, None], limit, table, BM, BN)
        seen &= (row < n.queries)[None, :]
        p = tl.exp2(tl.where(seen, s, float("-inf")) - norm[None, :])
        total += tl.sum(tl.where(seen, p, 0.0), 1)
    at = tl.program_id(1).to(tl.int64) * n.keys + key
    tl.store(out + at, total, mask=key < n.keys)


def received_by_keys(x: AttentionInputs, how: Looking, lse: Float[Tensor, "b h q"]) -> Memory:
    """What each key received, in all or from each of some groups of queries;
    with what settings is said."""
    plain = x.bias is None and x.softcap is None
    if how.hopper and plain and fits_hopper(x):
        return (received_on_hopper(x, lse),)
    B, H, _, K = x.shape
    out = lse.new_empty(B, H, K)
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=True)
    _received[(tiles_of(K, how.keys), B * H)](
        sheet(x.q), sheet(x.k), lse, out, rule, added(x), score(x), sizes(x),
        **constants_of(x, how.rows, how.keys, how.precision), STAGES=how.stages,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return (out,)
