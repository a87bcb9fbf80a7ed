"""What the heads of one call do, added up over rows: a sum and a count for each score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.interpret.head_scores.pairs.asked_totals import asked_totals
from regard.interpret.head_scores.pairs.pair_totals import REACH, PairTotals
from regard.interpret.head_scores.pairs.swept_totals import Sweep
from regard.interpret.head_scores.pairs.weight_blocks import (
    Block,
    apart,
    blocks,
    entropy_sums,
    seeing_rows,
)
from regard.interpret.head_scores.sides import Sides
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
    """The sums of a call: from questions about it where kernels answer them, else from one sweep
    over its rows. `arcs` are (sequence, query, key). `also` is handed every block of weights, so
    that whoever asks more of them need not compute them again."""
    if apart(trace.inputs):
        if also is not None:
            for block in blocks(trace):
                also(block)
        alone = trace.inputs.shape.H
        every = [call_sums(_heads(trace, h), sides, arcs) for h in range(alone)]
        return _side_by_side(every)
    x = trace.inputs
    asked = asked_totals(trace, sides) if arcs is None and also is None else None
    totals = _swept(trace, sides, arcs, also) if asked is None else asked
    real = sides.query.real if sides.query.padded else None
    rows = seeing_rows(trace, real).double().sum(-1)
    scores: dict[str, Sum] = {"entropy": entropy_sums(trace, real)}
    if totals.tokens is not None:
        for i, name in enumerate(("duplicate", "induction")):
            count = totals.token_rows[:, i, None].expand(-1, x.shape.H)
            scores[name] = totals.tokens[..., i], count.double()
    offsets = None
    if sides.own:
        there = totals.offset_rows[:, None].expand(-1, x.shape.H, -1).double()
        offsets = totals.offsets, there
        scores["distance"] = totals.away, rows
        near = slice(REACH - NEAR, REACH + NEAR + 1)
        scores["nearby"] = offsets[0][..., near].sum(-1), rows
        for name, place in (("previous", REACH + 1), ("next", REACH - 1)):
            scores[name] = offsets[0][..., place], there[..., place]
    first = sides.key.first.view(-1, 1, 1).expand(-1, x.shape.H, 1)
    scores["first"] = totals.received.gather(-1, first)[..., 0], rows
    return CallSums(scores, offsets, totals.received, rows, totals.arcs)


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
        joined([one.received for one in every]),
        joined([one.rows for one in every]),
        joined(arcs) if arcs else None,
    )
