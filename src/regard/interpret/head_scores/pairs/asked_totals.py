"""The totals of a call, from questions that kernels answer without writing weights down."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from regard.backends.exactness import taken_as_told
from regard.biases.dense import Dense
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.pairs.key_columns import PLACE
from regard.interpret.head_scores.pairs.pair_totals import OFFSETS, REACH, PairTotals, Weighed
from regard.interpret.head_scores.pairs.row_totals import RowTotals
from regard.interpret.head_scores.pairs.weight_blocks import looks_back, open_at
from regard.interpret.head_scores.texts.sides import Side, Sides
from regard.traces import Trace


def asked_totals(
    trace: Trace,
    sides: Sides,
    rows: RowTotals,
    weighed: Weighed | None = None,
    *,
    hopeful: bool = False,
) -> PairTotals | None:
    """None where no kernel answers, or not all of it. What `weighed` holds is not computed again.
    `hopeful` does not wait for the device to say whether float32 is exact enough for a call.

    How far back weight falls follows from what each key received, if no query looks ahead: the
    places of all rows, less the places that their weight fell on. That is exact to about a
    millionth of the length of a text, the rounding of a row's sum of weights.
    """
    x, asks = trace.inputs, trace.second_pass
    if x.sink is not None or isinstance(x.bias, Dense) or (sides.own and not looks_back(x)):
        return None
    told = taken_as_told(x) if hopeful else None
    x, sure = (x, None) if told is None else told
    lse = trace.rows.lse
    if sides.query.padded:
        # Rows that see nothing give nothing.
        lse = lse.masked_fill(~sides.query.real[:, None], -torch.inf)
    B, H = x.shape[:2]
    if sides.own:
        by_offset = asks.offset_sums(x, lse, REACH)
        if by_offset is None:
            return None
        offsets, offset_rows = by_offset.double(), _rows_by_offset(x, sides.query)
    else:
        offsets = lse.new_zeros(B, H, OFFSETS, dtype=torch.float64)
        offset_rows = torch.zeros(B, OFFSETS, dtype=torch.long, device=lse.device)
    tokens = token_rows = None
    if sides.query.ids is not None and sides.key.ids is not None:
        matches = (
            sides.query.own_matches if sides.own else sides.query.matches(sides.key, earlier=False)
        )
        answers = [asks.matching_mass(x, lse, each) for each in matches]
        found = [answer for answer in answers if answer is not None]
        if len(found) < len(answers):
            return None
        tokens = torch.stack([mass.sum(-1, dtype=torch.float64) for mass, _ in found], -1)

        def met() -> Tensor:
            return torch.stack([some.sum(-1) for _, some in found], -1)

        token_rows = sides.query.counted("matches", x, met) if sides.own else met()
    received = asks.received(x, lse).double() if weighed is None else None
    away = None
    if sides.own:
        if received is None:
            assert weighed is not None
            fell = weighed[PLACE]
        else:
            fell = received @ torch.arange(x.shape.K, device=lse.device, dtype=torch.float64)
        away = rows.places - fell
    return PairTotals(received, away, offsets, offset_rows, tokens, token_rows, None, sure)


def _rows_by_offset(x: AttentionInputs, side: Side) -> Int[Tensor, "b offsets"]:
    """How many rows may see something at each offset."""
    return side.counted("rows by offset", x, lambda: _count_by_offset(x, side))


def _count_by_offset(x: AttentionInputs, side: Side) -> Int[Tensor, "b offsets"]:
    query = torch.arange(x.shape.Q, device=x.q.device)[:, None]
    offset = torch.arange(-REACH, REACH + 1, device=x.q.device)
    key = query + (x.shape.K - x.shape.Q) - offset
    inside = (key >= 0) & (key < x.shape.K)
    seen = open_at(x, query, key.clamp(0, x.shape.K - 1)) & inside & side.real[..., None]
    return seen.sum(1).expand(x.shape.B, -1)
