"""The forward pass: output and row statistics in one walk over the tiles.

For each row, with m the largest logit so far, l = Σ exp(s - m), e = Σ exp(s - m)(s - m) and
o = Σ exp(s - m) v are kept. When m moves by δ = m_old - m_new, the sums shrink by α = exp(δ):

    l ← α l + …      o ← α o + …      e ← α (e + l δ) + …

At the end lse = m + log l, entropy = log l - e / l and out = o / l.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.poison import poison
from regard.backends.tiled.walk import Cut, RowTile, slabs, tile_size
from regard.biases.dense import Dense
from regard.inputs import AttentionInputs


def forward(x: AttentionInputs, *, statistics: bool) -> Rows:
    """Output and lse; the largest logit and the entropy only if asked for (else empty tensors)."""
    B, H, Q, _ = x.shape
    out = x.v.new_empty(B, H, Q, x.v.shape[-1])
    rows = Rows(out, *(x.q.new_empty(B, H, Q, dtype=x.compute_dtype) for _ in range(3)))
    memory = _Memory(x, buffers=2 if statistics else 1)
    for slab in slabs(x):
        for tile in slab.row_tiles():
            tally = _Tally(tile, memory, statistics)
            for cut in tile.cuts:
                tally.add(cut)
            tally.write(rows)
    if not statistics:
        return Rows(rows.out, rows.lse, rows.lse.new_empty(0), rows.lse.new_empty(0))
    return rows


class _Memory:
    """Buffers for a tile's logits and weights, used again for every tile."""

    def __init__(self, x: AttentionInputs, buffers: int) -> None:
        size = tile_size(x)
        heads = max(size.heads, 1) * x.group
        n = heads * size.rows * min(size.keys, max(x.shape.K, 1))
        self.logits = x.q.new_empty(n, dtype=x.compute_dtype)
        self.weights = torch.empty_like(self.logits) if buffers == 2 else None


class _Tally:
    """The running sums of one row tile."""

    def __init__(self, tile: RowTile, memory: _Memory, statistics: bool) -> None:
        self.tile, self.memory, self.statistics = tile, memory, statistics
        x = tile.slab.x
        self.bias_may_hide = isinstance(x.bias, Dense)
        rows = tile.q.shape[:4]
        self.largest = tile.q.new_full((*rows, 1), torch.finfo(tile.q.dtype).min)
        self.total = tile.q.new_zeros(*rows, 1)
        self.energy = tile.q.new_zeros(*rows, 1)
        self.mixed = tile.q.new_zeros(*rows, x.v.shape[-1])
        self.fresh = True

    def add(self, cut: Cut) -> None:
        s = self.tile.logits(cut, into=self.memory.logits)
        # Rows that have seen nothing keep the least number for a maximum; `write` replaces it.
        largest = torch.maximum(self.largest, s.amax(-1, keepdim=True))
        s.sub_(largest)
        p = s.exp_() if not self.statistics else torch.exp(s, out=self._weights_like(s))
        total = p.sum(-1, keepdim=True)
        if self.statistics:
            if cut.hidden is not None or self.bias_may_hide:
                s.masked_fill_(p == 0, 0.0)
            energy = s.mul_(p).sum(-1, keepdim=True)
        if self.fresh:
            self.total = total
            if self.statistics:
                self.energy = energy
        else:
            moved = self.largest - largest
            shrink = moved.exp()
            if self.statistics:
                self.energy.add_(self.total * moved).mul_(shrink).add_(energy)
            self.total.mul_(shrink).add_(total)
            self.mixed.mul_(shrink)
        self._mix(p, cut)
        self.largest = largest
        self.fresh = False

    def _weights_like(self, s: Tensor) -> Tensor:
        assert self.memory.weights is not None
        return self.memory.weights[: s.numel()].view(s.shape)

    def _mix(self, p: Tensor, cut: Cut) -> None:
        slab = self.tile.slab
        if slab.x.dropout:
            p = p.mul_(self.tile.keeps(cut)).div_(1 - slab.x.dropout)
        v = (slab.v if cut.hidden is None else slab.v_finite)[:, :, cut.keys]
        n = v.shape[0] * v.shape[1]
        # In place: the mixed values are as large as a tile of the output.
        self.mixed.view(n, -1, v.shape[-1]).baddbmm_(
            p.flatten(2, 3).flatten(0, 1), v.reshape(n, v.shape[2], v.shape[3])
        )
        if not slab.finite and cut.hidden is not None:
            v = slab.v[:, :, None, cut.keys]
            allowed = (~cut.hidden).to(v.dtype)
            self.mixed += poison(v, lambda what: torch.matmul(allowed, what) > 0)

    def write(self, rows: Rows) -> None:
        tile = self.tile
        empty = self.total == 0
        total = torch.where(empty, 1.0, self.total)
        log_total = total.log()
        lse = torch.where(empty, -math.inf, self.largest + log_total)
        out = self.mixed / total
        entropy = torch.where(empty, 0.0, log_total - self.energy / total)
        sink = tile.slab.x.sink
        if sink is not None:
            # The sink is one more place to look: entropy of (keys or sink), then within the keys.
            sink = sink.to(lse.dtype).view(1, -1, tile.slab.x.group, 1, 1)
            keys_only, lse = lse, torch.logaddexp(lse, sink)
            log_share = torch.where(empty, 0.0, keys_only - lse)
            share = torch.where(empty, 0.0, log_share.exp())
            log_rest = sink - lse
            out = out * share
            entropy = share * (entropy - log_share) - log_rest.exp() * log_rest
        tile.put(rows.out, out.to(rows.out.dtype))
        tile.put(rows.lse, lse.squeeze(-1))
        if self.statistics:
            largest = torch.where(empty, -math.inf, self.largest)
            tile.put(rows.max_logit, largest.squeeze(-1))
            tile.put(rows.entropy, entropy.squeeze(-1))
