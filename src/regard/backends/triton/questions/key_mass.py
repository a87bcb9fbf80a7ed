"""What falls from each query on the keys of a list, or the largest of their logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.triton.arguments import (
    added,
    constants_of,
    on_card,
    score,
    sheet,
    sizes,
    tiles_of,
)
from regard.backends.triton.launches.launched import launched
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import LN2, load_rows, logits_of, norms, product
from regard.backends.triton.rules import allowed, limit_of, runs_of
from regard.backends.triton.settings.tuning import Looking
from regard.inputs import AttentionInputs


@launched
@triton.jit
def _mass(
    q, k, lse, keys, out, rule, bias, scoring, n, many,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """What falls from each query on the keys of a list (without one, on the first key), or the
    largest of their logits."""
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tl.program_id(0) * BM
    row = first + tl.arange(0, BM)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    limit = limit_of(rule, n, b)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    if not LOGITS:
        norm = norms(lse, at, row < n.queries)[:, None]
    base = k.ptr + b.to(tl.int64) * k.batch + (h // n.group).to(tl.int64) * k.head
    column = tl.arange(0, BD)[:, None]
    total = tl.full((BM,), float("-inf") if LOGITS else 0.0, tl.float32)
    for start in range(0, many, BN):
        slot = start + tl.arange(0, BN)
        key = 0 * slot[None, :]
        if keys is not None:
            key = tl.load(keys + slot, mask=slot < many, other=0).to(tl.int32)[None, :]
        ks = tl.load(base + key.to(tl.int64) * k.row + column, mask=column < D, other=0.0)
        s = product(qs, ks, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, key, n)
        seen = (
            allowed(rule, place, key, limit, runs_of(rule, b, h), BM, BN) & (slot < many)[None, :]
        )
        if LOGITS:
            total = tl.maximum(total, tl.max(tl.where(seen, s * LN2, float("-inf")), 1))
        else:
            total += tl.sum(tl.where(seen, tl.exp2(s - norm), 0.0), 1)
    tl.store(out + at, total, mask=row < n.queries)


def of_keys(
    x: AttentionInputs,
    how: Looking,
    lse: Float[Tensor, "b h q"] | None,
    keys: Int[Tensor, "k"] | None,
) -> Float[Tensor, "b h q"]:
    """What falls from each query on some keys, or on the first; without an lse, the largest of
    their logits. With what settings is said."""
    out = torch.empty(x.shape[:3], dtype=torch.float32, device=x.q.device)
    rule = rule_of(x.mask, x.shape, (how.rows, 16), x.q.device, by_keys=False)
    with on_card(out):
        _mass[(tiles_of(x.shape.Q, how.rows), x.shape.B * x.shape.H)](
            sheet(x.q), sheet(x.k), None if lse is None else lse.contiguous(),
            None if keys is None else keys.contiguous(), out, rule, added(x), score(x), sizes(x),
            1 if keys is None else len(keys),
            **constants_of(x, how.rows, 16, how.precision), LOGITS=lse is None, num_warps=4,
        )  # fmt: skip
    return out
