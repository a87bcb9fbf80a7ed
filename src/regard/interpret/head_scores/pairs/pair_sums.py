"""What the heads of one call do, added up over rows: a sum and a count for each score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from regard.interpret.head_scores.pairs.asked_totals import asked_totals
from regard.interpret.head_scores.pairs.key_columns import FIRST
from regard.interpret.head_scores.pairs.pair_totals import REACH, PairTotals, Weighed
from regard.interpret.head_scores.pairs.row_totals import row_totals
from regard.interpret.head_scores.pairs.swept_totals import Sweep
from regard.interpret.head_scores.pairs.weight_blocks import (
    Block,
    apart,
    blocks,
)
from regard.interpret.head_scores.texts.sides import Sides
from regard.traces import Chosen, Trace

NEAR = 4
"""Places, either way, that count as nearby."""
Sum = tuple[Float[Tensor, "b h *offsets"], Float[Tensor, "b h *offsets"]]


class CallSums(NamedTuple):
    """Of one call, apart for each sequence and head."""

    scores: dict[str, Sum]
    """By the name of a score: what it adds up, and what that is divided by."""
    offsets: Sum | None
    """The same for each offset [b h offsets]; None where queries and keys are different texts."""
    received: Float[Tensor, "b h k"] | None
    """What each key got from the rows that are no padding; None where numbers of keys were weighed
    instead."""
    rows: Float[Tensor, "b h"]
    """How many rows see something."""
    arcs: Float[Tensor, "n h 3"] | None
    """For each arc that was asked about: its weight, whether no other key has more, and whether
    the pair may be seen at all."""
    sure: Bool[Tensor, ""] | None = None
    """Whether all of it holds, where that was left open; as the device has it."""

    def on_keys(self, numbers: Shaped[Tensor, "b #h k"]) -> Float[Tensor, "b h"]:
        """Numbers of keys, weighted by what the keys got and added up."""
        assert self.received is not None
        return (self.received * numbers).sum(-1)


def call_sums(
    trace: Trace,
    sides: Sides,
    arcs: Int[Tensor, "n 3"] | None = None,
    also: Callable[[Block], None] | None = None,
    weighed: Weighed | None = None,
    *,
    hopeful: bool = False,
) -> CallSums:
    """The sums of a call: from questions about it where kernels answer them, else from one sweep
    over its rows. `arcs` are (sequence, query, key). `also` is called with every block of weights,
    so that further questions need not compute them again. `weighed` are sums over keys that the
    forward pass gave; `hopeful` leaves open what would wait for the device."""
    if apart(trace.inputs):
        if also is not None:
            for block in blocks(trace):
                also(block)
        alone = trace.inputs.shape.H
        every = [call_sums(_heads(trace, h), sides, arcs) for h in range(alone)]
        return _side_by_side(every)
    x = trace.inputs
    of_rows = row_totals(trace, sides.query)
    rows = of_rows.many
    asked = None
    if arcs is None and also is None:
        asked = asked_totals(trace, sides, of_rows, weighed, hopeful=hopeful)
    totals = _swept(trace, sides, arcs, also) if asked is None else asked
    scores: dict[str, Sum] = {"entropy": (of_rows.entropy, of_rows.most)}
    if totals.tokens is not None and totals.token_rows is not None:
        for i, name in enumerate(("duplicate", "induction")):
            count = totals.token_rows[:, i, None].expand(-1, x.shape.H)
            scores[name] = totals.tokens[..., i], count.double()
    offsets = None
    if sides.own and totals.away is not None:
        there = totals.offset_rows[:, None].expand(-1, x.shape.H, -1).double()
        offsets = totals.offsets, there
        scores["distance"] = totals.away, rows
        near = slice(REACH - NEAR, REACH + NEAR + 1)
        scores["nearby"] = offsets[0][..., near].sum(-1), rows
        for name, place in (("previous", REACH + 1), ("next", REACH - 1)):
            scores[name] = offsets[0][..., place], there[..., place]
    if totals.received is None:
        assert weighed is not None
        scores["first"] = weighed[FIRST], rows
    else:
        first = sides.key.first.view(-1, 1, 1).expand(-1, x.shape.H, 1)
        scores["first"] = totals.received.gather(-1, first)[..., 0], rows
    return CallSums(scores, offsets, totals.received, rows, totals.arcs, totals.sure)


def _swept(
    trace: Trace,
    sides: Sides,
    arcs: Int[Tensor, "n 3"] | None,
    also: Callable[[Block], None] | None,
) -> PairTotals:
    sweep = Sweep(trace, sides, arcs)
    for block in blocks(trace):
        sweep.add(block)
        if also is not None:
            also(block)
    return sweep.totals()


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
        joined([one.received for one in every if one.received is not None]),
        joined([one.rows for one in every]),
        joined(arcs) if arcs else None,
    )
