"""The totals of a call, from questions that kernels answer without writing weights down."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.biases.dense import Dense
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.pairs.pair_totals import OFFSETS, REACH, PairTotals
from regard.interpret.head_scores.pairs.weight_blocks import looks_back, open_at
from regard.interpret.head_scores.sides import Side, Sides
from regard.traces import Trace


def asked_totals(trace: Trace, sides: Sides) -> PairTotals | None:
    """None where no kernel answers, or not all of it.

    How far away weight falls is told by what each key received, if nobody looks ahead: the places
    of all rows, less the places that their weight fell on. That is exact to about a millionth of
    the length of a text, the rounding of a row's sum of weights.
    """
    x, asks = trace.inputs, trace.second_pass
    if x.sink is not None or isinstance(x.bias, Dense) or (sides.own and not looks_back(x)):
        return None
    lse = trace.rows.lse
    if sides.query.padded:
        # Rows that see nothing give nothing.
        lse = lse.masked_fill(~sides.query.real[:, None], -torch.inf)
    B, H = x.shape[:2]
    offsets = lse.new_zeros(B, H, OFFSETS, dtype=torch.float64)
    offset_rows = torch.zeros(B, OFFSETS, dtype=torch.long, device=lse.device)
    if sides.own:
        found = asks.offset_sums(x, lse, REACH)
        if found is None:
            return None
        offsets, offset_rows = found.double(), _rows_by_offset(x, sides.query)
    tokens, token_rows = None, torch.zeros(B, 2, dtype=torch.long, device=lse.device)
    if sides.query.ids is not None and sides.key.ids is not None:
        kin = sides.query.own_kin if sides.own else sides.query.kin(sides.key, earlier=False)
        answers = [asks.kin_mass(x, lse, each) for each in kin]
        told = [answer for answer in answers if answer is not None]
        if len(told) < len(answers):
            return None
        tokens = torch.stack([mass.sum(-1, dtype=torch.float64) for mass, _ in told], -1)
        token_rows = torch.stack([met.sum(-1) for _, met in told], -1)
    received = asks.received(x, lse).double()
    away = _away(x, lse, received) if sides.own else received.new_zeros(B, H)
    return PairTotals(received, away, offsets, offset_rows, tokens, token_rows, None)


def _away(
    x: AttentionInputs, lse: Float[Tensor, "b h q"], received: Float[Tensor, "b h k"]
) -> Float[Tensor, "b h"]:
    query = torch.arange(x.shape.Q, device=lse.device, dtype=torch.float64)
    key = torch.arange(x.shape.K, device=lse.device, dtype=torch.float64)
    gives = (lse > -torch.inf).double()
    return gives @ (query + (x.shape.K - x.shape.Q)) - received @ key


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
