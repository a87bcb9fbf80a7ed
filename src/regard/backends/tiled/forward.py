"""The forward pass: output and row statistics in one pass over the tiles.

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
from regard.backends.poison import all_finite, poison
from regard.backends.tiled.fused import Passed, attend, fusing
from regard.backends.tiled.loop import Loop, loop_for
from regard.backends.tiled.tiles import Cut, RowTile, slabs, tile_size
from regard.biases.dense import Dense
from regard.cancellation import step
from regard.inputs import AttentionInputs
from regard.scores.comparison import FeatureProduct

FAINT = -1000.0
"""A logit so far below the largest has a weight of 0, and 0 can still be multiplied by it."""


class Sums(NamedTuple):
    """The running sums of every row: o, m, l and e."""

    mixed: Float[Tensor, "b h q e"]
    largest: Float[Tensor, "b h q"]
    total: Float[Tensor, "b h q"]
    energy: Float[Tensor, "b h q"]


def forward(x: AttentionInputs, *, statistics: bool) -> Passed:
    """Output and lse; the largest logit and the entropy only if asked for (else empty tensors)."""
    loop = fusing(x)
    passed = None if loop is None else attend(x, loop, statistics=statistics)
    if passed is not None:
        return passed
    B, H, Q, _ = x.shape
    mixed = x.v.new_empty(B, H, Q, x.v.shape[-1], dtype=x.compute_dtype)
    sums = Sums(mixed, *(mixed.new_empty(B, H, Q) for _ in range(3)))
    _by_tiles(x, sums, statistics=statistics)
    return _finished(x, sums, statistics=statistics)


def _by_tiles(x: AttentionInputs, sums: Sums, *, statistics: bool) -> None:
    # Hidden logits are written over, whatever they are; only hidden values can do harm.
    is_finite = x.mask is None or all_finite(x.v)
    memory = _Memory(x, statistics)
    for slab in slabs(x, is_finite=is_finite):
        for tile in slab.row_tiles():
            step(tile.rows.start, x.shape.Q)
            tally = _Tally(tile, memory, statistics)
            for cut in tile.cuts:
                tally.add(cut)
            tally.write(sums)


class _Memory:
    """Buffers for a tile's logits and weights, used again for every tile."""

    def __init__(self, x: AttentionInputs, statistics: bool) -> None:
        size = tile_size(x)
        n = size.heads * x.group * size.rows * min(size.keys, max(x.shape.K, 1))
        self.logits = x.q.new_empty(n, dtype=x.compute_dtype)
        self.loop = loop_for(self.logits.device, self.logits.dtype)
        apart = statistics and self.loop is None
        self.weights = torch.empty_like(self.logits) if apart else None


class _Tally:
    """The running sums of one row tile."""

    def __init__(self, tile: RowTile, memory: _Memory, statistics: bool) -> None:
        self.tile, self.memory, self.statistics = tile, memory, statistics
        x = tile.slab.x
        self.logits_may_hide = isinstance(x.bias, Dense) or isinstance(x.comparison, FeatureProduct)
        # A finite maximum for rows that have seen nothing. A float mask may be as low.
        self.least = torch.finfo(tile.q.dtype).min
        self.largest: Tensor
        self.total: Tensor
        self.energy: Tensor
        self.mixed: Tensor | None = None

    def add(self, cut: Cut) -> None:
        s = self.tile.logits(cut, into=self.memory.logits)
        if self.memory.loop is None:
            p = self._absorbed(s, cut)
        else:
            p = self._absorbed_by(self.memory.loop, s)
        self._mix(p, cut)

    def _absorbed_by(self, loop: Loop, s: Tensor) -> Tensor:
        if self.mixed is None:
            self.largest, self.total, self.energy = s.new_empty(3, *s.shape[:-1], 1)
        energy = self.energy if self.statistics else None
        p = s.contiguous()
        loop.absorb(p, self.largest, self.total, energy, self.mixed)
        return p

    def _absorbed(self, s: Tensor, cut: Cut) -> Tensor:
        largest = s.amax(-1, keepdim=True)
        if self.mixed is None:
            largest.clamp_min_(self.least)
        else:
            torch.maximum(largest, self.largest, out=largest)
        s.sub_(largest)
        p = s.exp_() if not self.statistics else torch.exp(s, out=self._weights_like(s))
        total = p.sum(-1, keepdim=True)
        energy = self._energy(s, p, cut) if self.statistics else total
        if self.mixed is None:
            self.total, self.energy = total, energy
        else:
            moved = (self.largest - largest).clamp_min_(FAINT)
            shrink = moved.exp()
            if self.statistics:
                self.energy.addcmul_(self.total, moved).mul_(shrink).add_(energy)
            self.total.mul_(shrink).add_(total)
            self.mixed.mul_(shrink)
        self.largest = largest
        return p

    def _energy(self, s: Tensor, p: Tensor, cut: Cut) -> Tensor:
        """Σ p (s - m), in which hidden pairs are 0 and not 0 · ∞."""
        if self.logits_may_hide or not self.tile.slab.keys_are_finite:
            s.masked_fill_(p == 0, 0.0)
        return cut.fill(s, 0.0).mul_(p).sum(-1, keepdim=True)

    def _weights_like(self, s: Tensor) -> Tensor:
        assert self.memory.weights is not None
        return self.memory.weights[: s.numel()].view(s.shape)

    def _mix(self, p: Tensor, cut: Cut) -> None:
        slab = self.tile.slab
        if slab.x.dropout:
            p = p.mul_(self.tile.keeps(cut)).div_(1 - slab.x.dropout)
        v = (slab.v_finite if cut.partial else slab.v)[:, :, cut.keys]
        n, wide = v.shape[0] * v.shape[1], v.shape[-1]
        rows, keys = p.shape[2] * p.shape[3], p.shape[4]
        weights = p.view(n, rows, keys)
        values = v.reshape(n, keys, wide)
        if self.mixed is None:
            self.mixed = torch.bmm(weights, values).view(*p.shape[:4], wide)
        else:
            self.mixed.view(n, rows, wide).baddbmm_(weights, values)
        if not slab.finite and cut.partial:
            v = slab.v[:, :, None, cut.keys]
            allowed = cut.fill(torch.ones_like(p), 0.0)
            self.mixed += poison(v, lambda what: torch.matmul(allowed, what) > 0)

    def write(self, sums: Sums) -> None:
        put = self.tile.put
        if self.mixed is None:
            for total, nothing in zip(sums, (0.0, self.least, 0.0, 0.0), strict=True):
                total[self.tile.where] = nothing
            return
        put(sums.mixed, self.mixed)
        put(sums.largest, self.largest[..., 0])
        put(sums.total, self.total[..., 0])
        if self.statistics:
            put(sums.energy, self.energy[..., 0])


def _finished(x: AttentionInputs, sums: Sums, *, statistics: bool) -> Passed:
    """Output, lse and statistics from the sums, for all rows at once."""
    largest, keys = sums.largest, sums.total
    shift, total = largest, keys
    if x.sink is not None:
        # The sink is one more term of the sum.
        sink = x.sink.to(total.dtype)[:, None]
        shift = torch.maximum(largest, sink)
        total = keys * (largest - shift).exp() + (sink - shift).exp()
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    log_total = total.log()
    lse = (shift + log_total).masked_fill_(nothing, -math.inf)
    rest = ((shift - lse) + log_total).masked_fill_(nothing, 0.0)
    factor = (largest - shift).exp_().div_(total)
    out = sums.mixed.mul_(factor[..., None]).to(x.v.dtype)
    if not statistics:
        none = lse.new_empty(0)
        return Passed(Rows(out, lse, none, none.clone()), rest)
    unseen = keys == 0
    log_keys = keys.masked_fill(unseen, 1.0).log()
    entropy = (log_keys - sums.energy / keys).masked_fill_(unseen, 0.0)
    if x.sink is not None:
        # Entropy of (keys or sink), then within the keys.
        log_share = (log_keys + (largest - shift) - log_total).masked_fill_(unseen, 0.0)
        share = log_share.exp().masked_fill_(unseen, 0.0)
        log_rest = (sink - shift) - log_total
        own = (log_rest.exp() * log_rest).masked_fill_(log_rest == -math.inf, 0.0)
        entropy = share * (entropy - log_share) - own
    return Passed(Rows(out, lse, largest.masked_fill(unseen, -math.inf), entropy), rest)
