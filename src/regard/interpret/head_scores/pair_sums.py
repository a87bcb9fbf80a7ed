"""What the heads of one call do, added up over rows: a sum and a count for each score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from regard.interpret.head_scores.sides import Sides
from regard.interpret.head_scores.weight_blocks import (
    Block,
    apart,
    blocks,
    distances,
    entropy_sums,
    open_pairs,
    seeing_rows,
)
from regard.traces import Chosen, Trace

REACH = 64
"""The farthest fixed offset that is looked for, either way."""
NEAR = 4
"""Places, either way, that count as nearby."""
OFFSETS = 2 * REACH + 1
"""Offsets are kept from -REACH (a later token) to REACH (an earlier one)."""

Sum = tuple[Float[Tensor, "b h *offsets"], Float[Tensor, "b h *offsets"]]


class CallSums(NamedTuple):
    """Of one call, apart for each sequence and head."""

    scores: dict[str, Sum]
    """By the name of a score: what it adds up, and what that is divided by."""
    offsets: Sum | None
    """The same for each offset [b h offsets]; None where queries and keys are different texts."""
    received: Float[Tensor, "b h k"]
    """What each key got from the rows that are no padding."""
    rows: Float[Tensor, "b h"]
    """How many rows see something."""
    arcs: Float[Tensor, "n h 3"] | None
    """For each arc that was asked about: its weight, whether no other key has more, and whether
    the pair may be seen at all."""


def call_sums(
    trace: Trace,
    sides: Sides,
    arcs: Int[Tensor, "n 3"] | None = None,
    also: Callable[[Block], None] | None = None,
) -> CallSums:
    """One sweep over the rows of a call. `arcs` are (sequence, query, key). `also` is handed every
    block of weights, so that whoever asks more of them need not compute them again."""
    if apart(trace.inputs):
        if also is not None:
            for block in blocks(trace):
                also(block)
        alone = trace.inputs.shape.H
        every = [call_sums(_heads(trace, h), sides, arcs) for h in range(alone)]
        return _side_by_side(every)
    x, sweep = trace.inputs, _Sweep(trace, sides, arcs)
    for block in blocks(trace):
        sweep.add(block)
        if also is not None:
            also(block)
    real = sides.query.real if sides.query.padded else None
    rows = seeing_rows(trace, real).double().sum(-1)
    scores: dict[str, Sum] = {"entropy": entropy_sums(trace, real)}
    if sweep.token_sums is not None:
        for i, name in enumerate(("duplicate", "induction")):
            count = sweep.token_rows[:, i, None].expand(-1, x.shape.H)
            scores[name] = sweep.token_sums[..., i], count.double()
    offsets = None
    if sides.own:
        there = sweep.offset_rows[:, None].expand(-1, x.shape.H, -1).double()
        offsets = sweep.offset_sums, there
        scores["distance"] = sweep.away, rows
        near = slice(REACH - NEAR, REACH + NEAR + 1)
        scores["nearby"] = offsets[0][..., near].sum(-1), rows
        for name, place in (("previous", REACH + 1), ("next", REACH - 1)):
            scores[name] = offsets[0][..., place], there[..., place]
    found = sweep.received
    first = sides.key.first.view(-1, 1, 1).expand(-1, x.shape.H, 1)
    scores["first"] = found.gather(-1, first)[..., 0], rows
    return CallSums(scores, offsets, found, rows, sweep.arc_weights)


class _Sweep:
    """Sums that grow block by block."""

    def __init__(self, trace: Trace, sides: Sides, arcs: Int[Tensor, "n 3"] | None) -> None:
        x = self.x = trace.inputs
        self.sides, self.arcs = sides, arcs
        B, H, _, K = x.shape
        zeros = trace.rows.lse.new_zeros
        self.received = zeros(B, H, K, dtype=torch.float64)
        self.away = zeros(B, H, dtype=torch.float64)
        self.offset_sums = zeros(B, H, OFFSETS, dtype=torch.float64)
        self.offset_rows = zeros(B, OFFSETS, dtype=torch.long)
        told = sides.query.ids is not None and sides.key.ids is not None
        self.token_sums = zeros(B, H, 2, dtype=torch.float64) if told else None
        self.token_rows = zeros(B, 2, dtype=torch.long)
        self.arc_weights = None if arcs is None else zeros(len(arcs), H, 3)

    def add(self, block: Block) -> None:
        q, k, w = block
        if self.sides.query.padded:
            w = w * self.sides.query.real[:, None, q, None]
        self.received[..., k[0] : k[-1] + 1] += w.sum(-2)
        seen = open_pairs(self.x, q, k)[:, 0] & self.sides.query.real[:, q, None]
        kinds = []
        if self.token_sums is not None:
            same, after = self._tokens(q, k)
            kinds = [same & seen, after & seen]
            self.token_rows += torch.stack([kind.any(-1).sum(-1) for kind in kinds], -1)
        # One product reads the weights once, for every head and kind of pair.
        by_kind = torch.stack([kind.to(w.dtype) for kind in kinds], -1) if kinds else None
        if self.sides.own:
            away = distances(self.x, block)[None, ..., None].expand(len(w), -1, -1, -1)
            by_kind = away if by_kind is None else torch.cat([by_kind, away], -1)
            self._offsets(q, k, w, seen)
        if by_kind is not None:
            summed = (w.flatten(2) @ by_kind.flatten(1, 2)).double()
            if self.token_sums is not None:
                self.token_sums += summed[..., :2]
            if self.sides.own:
                self.away += summed[..., -1]
        if self.arcs is not None:
            self._arcs(q, k, w, seen)

    def _tokens(
        self, q: Int[Tensor, "q"], k: Int[Tensor, "k"]
    ) -> tuple[Bool[Tensor, "b q k"], Bool[Tensor, "b q k"]]:
        """Pairs of the same token, and those whose key follows a copy of the query's token."""
        asks, holds = self.sides.query.ids, self.sides.key.ids
        assert asks is not None
        assert holds is not None
        real = self.sides.key.real
        before = torch.cat([holds[:, :1], holds[:, :-1]], 1)
        follows = real & torch.cat([torch.zeros_like(real[:, :1]), real[:, :-1]], 1)
        token = asks[:, q, None]
        same = (token == holds[:, None, k]) & real[:, None, k]
        after = (token == before[:, None, k]) & follows[:, None, k]
        if self.sides.own:
            earlier = k < q[:, None] + (self.x.shape.K - self.x.shape.Q)
            same, after = same & earlier, after & earlier
        return same, after

    def _offsets(
        self,
        q: Int[Tensor, "q"],
        k: Int[Tensor, "k"],
        w: Float[Tensor, "b h q k"],
        seen: Bool[Tensor, "b q k"],
    ) -> None:
        # The first key, of those that are there, at the farthest offset of the first query.
        first = int(q[0]) + self.x.shape.K - self.x.shape.Q - REACH - int(k[0])
        self.offset_rows += _by_offset(seen, first).sum(-2)
        self.offset_sums += _by_offset(w, first).sum(-2, dtype=torch.float64)

    def _arcs(
        self,
        q: Int[Tensor, "q"],
        k: Int[Tensor, "k"],
        w: Float[Tensor, "b h q k"],
        seen: Bool[Tensor, "b q k"],
    ) -> None:
        assert self.arcs is not None
        assert self.arc_weights is not None
        entry, query, key = self.arcs.unbind(1)
        inside = (query >= q[0]) & (query <= q[-1]) & (key >= k[0]) & (key <= k[-1])
        at = inside.nonzero()[:, 0]
        b, i, j = entry[at], query[at] - q[0], key[at] - k[0]
        mine, most = w[b, :, i, j], w.amax(-1)[b, :, i]
        shown = seen[b, i, j][:, None].expand_as(mine)
        hit = (mine >= most) & shown
        self.arc_weights[at] = torch.stack([mine, hit.to(w.dtype), shown.to(w.dtype)], -1)


def _by_offset(pairs: Shaped[Tensor, "*lead q k"], first: int) -> Shaped[Tensor, "*lead q offsets"]:
    """What each query has at each offset, the farthest later key first. Offset REACH of the first
    query is column `first`, of the next query the column after it; 0 where there is none."""
    rows = pairs.shape[-2]
    width = rows + OFFSETS - 1
    near = pairs[..., max(first, 0) : max(first + width, 0)]
    left = min(max(-first, 0), width)
    near = pad(near, (left, width - left - near.shape[-1])).contiguous()
    # Row i begins at column i: one column further on with each row.
    strides = near.stride()
    slanted = near.as_strided(
        (*near.shape[:-1], OFFSETS), (*strides[:-2], strides[-2] + 1, strides[-1])
    )
    return slanted.flip(-1)


def _heads(trace: Trace, head: int) -> Trace:
    every: list[Chosen] = [slice(None)] * max(len(trace.inputs.lead), 1)
    return trace[(*every, [head])]


def _side_by_side(every: Sequence[CallSums]) -> CallSums:
    def joined(parts: Sequence[Tensor], axis: int = 1) -> Tensor:
        return torch.cat(list(parts), axis)

    offsets = [one.offsets for one in every if one.offsets is not None]
    arcs = [one.arcs for one in every if one.arcs is not None]
    return CallSums(
        {
            name: (
                joined([one.scores[name][0] for one in every]),
                joined([one.scores[name][1] for one in every]),
            )
            for name in every[0].scores
        },
        (joined([o[0] for o in offsets]), joined([o[1] for o in offsets])) if offsets else None,
        joined([one.received for one in every]),
        joined([one.rows for one in every]),
        joined(arcs) if arcs else None,
    )
