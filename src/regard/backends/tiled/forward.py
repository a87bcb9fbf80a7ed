"""The forward pass: output and row statistics in one walk over the tiles.

For each row, with m the largest logit so far, l = Σ exp(s - m), e = Σ exp(s - m)(s - m) and
o = Σ exp(s - m) v are kept. When m moves by δ = m_old - m_new, the sums shrink by α = exp(δ):

    l ← α l + …      o ← α o + …      e ← α (e + l δ) + …

At the end lse = m + log l, entropy = log l - e / l and out = o / l.

Where |lse| is large, rounding it would cost the backward pass: weights exp(s - lse) would no longer
sum to 1. What rounding took away is kept beside it (`lse_rest`), so that exp(s - lse - lse_rest)
does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.poison import poison
from regard.backends.tiled.walk import Cut, RowTile, slabs, tile_size
from regard.biases.dense import Dense
from regard.inputs import AttentionInputs


class Passed(NamedTuple):
    """What the forward pass leaves behind: rows, and what rounding took from lse."""

    rows: Rows
    lse_rest: Float[Tensor, "b h q"]


def forward(x: AttentionInputs, *, statistics: bool) -> Passed:
    """Output and lse; the largest logit and the entropy only if asked for (else empty tensors)."""
    B, H, Q, _ = x.shape
    out = x.v.new_empty(B, H, Q, x.v.shape[-1])
    *columns, rest = (x.q.new_empty(B, H, Q, dtype=x.compute_dtype) for _ in range(4))
    passed = Passed(Rows(out, *columns), rest)
    memory = _Memory(x, buffers=2 if statistics else 1)
    for slab in slabs(x):
        for tile in slab.row_tiles():
            tally = _Tally(tile, memory, statistics)
            for cut in tile.cuts:
                tally.add(cut)
            tally.write(passed)
    if not statistics:
        none = rest.new_empty(0)
        return Passed(passed.rows._replace(max_logit=none, entropy=none.clone()), rest)
    return passed


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

    def write(self, passed: Passed) -> None:
        tile, rows = self.tile, passed.rows
        shift, total = self.largest, self.total
        sink = tile.slab.x.sink
        if sink is not None:
            # The sink is one more term of the sum.
            sink = sink.to(total.dtype).view(1, -1, tile.slab.x.group, 1, 1)
            shift = torch.maximum(shift, sink)
            total = total * (self.largest - shift).exp() + (sink - shift).exp()
        nothing = total == 0
        total = torch.where(nothing, 1.0, total)
        lse = torch.where(nothing, -math.inf, shift + total.log())
        rest = torch.where(nothing, 0.0, (shift - lse) + total.log())
        out = self.mixed * ((self.largest - shift).exp() / total)
        tile.put(rows.out, out.to(rows.out.dtype))
        tile.put(rows.lse, lse.squeeze(-1))
        tile.put(passed.lse_rest, rest.squeeze(-1))
        if not self.statistics:
            return
        unseen = self.total == 0
        keys = torch.where(unseen, 1.0, self.total)
        entropy = torch.where(unseen, 0.0, keys.log() - self.energy / keys)
        if sink is not None:
            # Entropy of (keys or sink), then within the keys.
            log_share = torch.where(unseen, 0.0, keys.log() + (self.largest - shift) - total.log())
            share = torch.where(unseen, 0.0, log_share.exp())
            log_rest = (sink - shift) - total.log()
            entropy = share * (entropy - log_share) - log_rest.exp() * log_rest
        tile.put(rows.max_logit, torch.where(unseen, -math.inf, self.largest).squeeze(-1))
        tile.put(rows.entropy, entropy.squeeze(-1))
