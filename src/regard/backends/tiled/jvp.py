"""Forward mode: tangents of output and row statistics from tangents of the inputs, tile by tile.

With p = exp(s - lse - lse_rest), E = lse - entropy and ṡ the tangent of a logit,

    ∂lse = Σ p ṡ      ∂out = Σ p (ṡ v + v̇) - ∂lse · out      ∂entropy = -Σ p ṡ (s - E).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.passes import Moved
from regard.backends.tiled.fused import Passed
from regard.backends.tiled.tiles import Cut, RowTile, Slab, grouped, slabs
from regard.inputs import AttentionInputs


class _Tangents(NamedTuple):
    """What a slab's tensors do, in the precision that scores are computed in."""

    x: AttentionInputs
    q: Tensor
    k: Tensor
    v: Tensor


def jvp(x: AttentionInputs, passed: Passed, moved: AttentionInputs, *, statistics: bool) -> Moved:
    """Tangents of out, lse and entropy; `moved` holds a tangent in place of every tensor."""
    rows = passed.rows
    found = Moved(
        torch.zeros_like(rows.out, dtype=x.compute_dtype),
        torch.zeros_like(rows.lse),
        torch.zeros_like(rows.lse) if statistics else rows.lse.new_empty(0),
    )
    for slab in slabs(x):
        tangents = _tangents(slab, moved)
        for tile in slab.row_tiles():
            _add_tile(slab, tile, tangents, passed, found, statistics=statistics)
    return found._replace(out=found.out.to(rows.out.dtype))


def _tangents(slab: Slab, moved: AttentionInputs) -> _Tangents:
    x = moved.select(slab.batch, slab.heads, slab.key_heads)
    q, k, v = (t.to(slab.k.dtype) for t in (x.q, x.k, x.v))
    q = q.unflatten(1, (-1, slab.x.group))
    if not slab.finite:
        # What is not finite stands still, as in the formula.
        q, k, v = (
            d.masked_fill(~t.isfinite(), 0.0) for d, t in ((q, slab.q), (k, slab.k), (v, slab.v))
        )
    return _Tangents(x, q, k, v)


def _add_tile(
    slab: Slab, tile: RowTile, d: _Tangents, passed: Passed, found: Moved, *, statistics: bool
) -> None:
    rows = passed.rows
    # A row that sees nothing has lse = -inf and only -inf logits; any finite number will do.
    lse = tile.take(rows.lse)
    lse = torch.where(lse.isinf(), 0.0, lse)[..., None]
    rest = tile.take(passed.lse_rest)[..., None]
    expected = lse - tile.take(rows.entropy)[..., None] if statistics else None
    d_lse = torch.zeros_like(lse)
    d_entropy = torch.zeros_like(lse)
    d_out = torch.zeros_like(tile.take(found.out))
    for cut in tile.cuts:
        s, slope = tile.logits_and_slope(cut)
        p = (s - lse).sub_(rest).exp_()
        weighed = p * _logit_tangents(slab, tile, cut, d, slope)
        d_lse += weighed.sum(-1, keepdim=True)
        if expected is not None:
            away = (s - expected).masked_fill_(p == 0, 0.0)
            d_entropy -= (weighed * away).sum(-1, keepdim=True)
        if slab.x.dropout:
            keeps = tile.keeps(cut).to(p.dtype).div_(1 - slab.x.dropout)
            p, weighed = p * keeps, weighed * keeps
        mixed = torch.matmul(weighed.flatten(2, 3), slab.v_finite[:, :, cut.keys])
        mixed += torch.matmul(p.flatten(2, 3), d.v[:, :, cut.keys])
        d_out += mixed.view(d_out.shape)
    if slab.x.sink is not None:
        assert d.x.sink is not None
        sink, d_sink = (
            t.to(lse.dtype).view(-1, slab.x.group, 1, 1) for t in (slab.x.sink, d.x.sink)
        )
        # A sink of minus infinity is none.
        weighed = (torch.exp(sink - lse - rest) * d_sink).masked_fill(sink == -math.inf, 0.0)
        d_lse += weighed
        if expected is not None:
            d_entropy -= weighed * (sink - expected).masked_fill(sink == -math.inf, 0.0)
    d_out -= d_lse * tile.take(rows.out).to(d_out.dtype)
    tile.put(found.out, d_out)
    tile.put(found.lse, d_lse[..., 0])
    if statistics:
        tile.put(found.entropy, d_entropy[..., 0])


def _logit_tangents(
    slab: Slab, tile: RowTile, cut: Cut, d: _Tangents, slope: Tensor | None
) -> Tensor:
    """ṡ of one cut, 0 where hidden."""
    keys = cut.keys
    ds = slab.x.comparison.push_forward(
        tile.q_finite, slab.k_finite[:, :, keys], d.q[:, :, :, tile.rows], d.k[:, :, keys],
        d.x.comparison,
    )  # fmt: skip
    if slope is not None:
        ds = ds * slope
    if slab.x.bias is not None:
        assert d.x.bias is not None
        added = slab.x.bias.push_forward(*tile.places(cut), d.x.bias)
        ds = ds + grouped(added.to(ds.dtype), slab.x.group)
    return ds if slab.finite else cut.fill(ds.contiguous(), 0.0)
