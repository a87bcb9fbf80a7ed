"""The passes of additive attention, forward and backward, as launches of its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.passes import Given, Pull
from regard.backends.triton.additive.backward_kernels import additive_keys, additive_queries
from regard.backends.triton.additive.forward_kernel import additive_tiles
from regard.backends.triton.additive.units import SPREAD, Units
from regard.backends.triton.arguments import (
    _NO,
    _YES,
    added,
    dropping,
    sheet,
    sizes,
    tiles_of,
    wide,
)
from regard.backends.triton.backward import _sink_gradient, expected_logit
from regard.backends.triton.forward_kernels import Written
from regard.backends.triton.gradients.row_numbers import RowNumbers, row_shift
from regard.backends.triton.launches.launched import together
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import Score, Sheet
from regard.inputs import AttentionInputs
from regard.scores.comparison import TanhSum


class Tile(NamedTuple):
    """Queries and keys of a tile, and the warps of its program."""

    rows: int
    keys: int
    warps: int


class Tiles(NamedTuple):
    """Tiles of the three kernels."""

    forward: Tile
    by_keys: Tile
    by_queries: Tile
    precision: str


def tiles_for(x: AttentionInputs) -> Tiles:
    """Small ones: four units of a tile, and sums as wide as values and units, are in registers."""
    widest = max(wide(x.q.shape[-1]), wide(x.v.shape[-1]))
    warps = 4 if widest <= 64 else 8
    few = 32 if widest <= 128 else 16
    # Three products of TF32 parts, nearly as accurate as one of float32.
    precision = "tf32x3" if x.q.dtype == torch.float32 else "tf32"
    return Tiles(Tile(64, 32, warps), Tile(32, few, warps), Tile(few, 32, warps), precision)


class _Prepared(NamedTuple):
    """A call in the form that kernels take."""

    q: Sheet
    k: Sheet
    units: Units
    score: Score


def _prepared(x: AttentionInputs) -> _Prepared:
    assert isinstance(x.comparison, TanhSum)
    # Not asked for: that would be to wait for the card.
    span = torch.maximum(x.q.detach().abs().amax(), x.k.detach().abs().amax()).to(torch.float32)
    turned = [(t.detach().to(torch.float32).mT * SPREAD.value).contiguous() for t in (x.q, x.k)]
    w = x.comparison.w.detach().to(torch.float32).contiguous()
    units = Units(w, 0 if w.ndim == 1 else w.shape[-1], span)
    score = Score(1.0, _YES, _NO if x.softcap is None else _YES, x.softcap or 1.0)
    return _Prepared(sheet(turned[0]), sheet(turned[1]), units, score)


def forward(x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
    """Output and row statistics, and what the backward pass needs beside them."""
    (B, H, Q, _), E = x.shape, x.v.shape[-1]
    how, call = tiles_for(x), _prepared(x)
    tile = how.forward
    out = x.v.new_empty(B, H, Q, E)
    lse = x.q.new_empty(B, H, Q, dtype=torch.float32)
    largest, entropy = (torch.empty_like(lse) if statistics else lse.new_empty(0) for _ in range(2))
    norm = lse.new_empty(2, B, H, Q)
    rule = rule_of(x.mask, x.shape, (tile.rows, tile.keys), x.q.device, by_keys=False)
    additive_tiles[(tiles_of(Q, tile.rows), B * H)](
        call.q, call.k, sheet(x.v), sheet(out), Written(lse, largest, entropy, norm, None),
        call.units, rule, added(x), x.sink, dropping(x), call.score, sizes(x),
        D=x.q.shape[-1], E=E, BE=wide(E), BM=tile.rows, BN=tile.keys, STATISTICS=statistics,
        PRECISION=how.precision, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
    return Rows(out, lse, largest, entropy), norm


def backward(x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull) -> Given:
    """Gradients of everything a call can learn, but for a bias."""
    g_out, g_lse, g_entropy = pull
    if g_out is None:
        g_out = torch.zeros_like(rows.out)
    expected = None
    if g_entropy is not None:
        g_entropy, expected = g_entropy.contiguous(), expected_logit(rows, kept)
    (B, H, Q, K), D, E = x.shape, x.q.shape[-1], x.v.shape[-1]
    how, call, n = tiles_for(x), _prepared(x), sizes(x)
    shift = torch.empty_like(rows.lse)
    numbers = RowNumbers(kept, shift, g_entropy, expected, rows.lse.numel(), rows.lse)
    dq, dk = (torch.empty_like(t, dtype=torch.float32).contiguous() for t in (x.q, x.k))
    dv = torch.empty_like(x.v).contiguous()
    few = tiles_of(Q, how.by_queries.rows)
    dw = shift.new_empty(B, H, few, D)
    v, g = sheet(x.v), sheet(g_out)
    with together():
        row_shift[(tiles_of(Q, 64), B * H)](
            sheet(rows.out), g, None if g_lse is None else g_lse.contiguous(), shift, n,
            E=E, BE=wide(E), BM=64,
        )  # fmt: skip
        for kernel, tile, grid, own in (
            (additive_keys, how.by_keys, (tiles_of(K, how.by_keys.keys), B * x.k.shape[1]),
             (sheet(dk), sheet(dv))),
            (additive_queries, how.by_queries, (few, B * H), (sheet(dq), dw)),
        ):  # fmt: skip
            by_keys = kernel is additive_keys
            rule = rule_of(x.mask, x.shape, (tile.rows, tile.keys), x.q.device, by_keys=by_keys)
            kernel[grid](
                call.q, call.k, v, g, *own, numbers, call.units, rule, added(x), dropping(x),
                call.score, n, D=D, E=E, BD=wide(D), BE=wide(E), BM=tile.rows, BN=tile.keys,
                PRECISION=how.precision, num_warps=tile.warps, num_stages=1,
            )  # fmt: skip
    d_sink = _sink_gradient(x, kept, shift, g_entropy, expected)
    assert isinstance(x.comparison, TanhSum)
    given = dw.sum((0, 2)) if x.comparison.w.ndim == 2 else dw.sum((0, 1, 2))
    return Given(dq, dk, dv, d_sink, [given], [])
