"""What the rows of one call add up to, without a look at its pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.biases.dense import Dense
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.pairs.weight_blocks import seeing_rows
from regard.interpret.head_scores.texts.sides import Side
from regard.seen import open_places
from regard.traces import Trace


class RowTotals(NamedTuple):
    """Over the rows that see something, of those that are no padding."""

    many: Float[Tensor, "b h"]
    places: Float[Tensor, "b h"]
    """Where each stands among the keys."""
    most: Float[Tensor, "b h"]
    """The most that the entropy of each could be: the log of how many places it may look at."""
    entropy: Float[Tensor, "b h"]


def row_totals(trace: Trace, side: Side) -> RowTotals:
    """Of the queries of a call, which stand on a side. All heads may see the same."""
    x = trace.inputs
    seeing = seeing_rows(trace, side.real if side.padded else None)
    if isinstance(x.bias, Dense) or x.sink is not None:
        of_row = _of_row(x)
    else:
        of_row = side.counted("rows", x, lambda: _of_row(x))
    many, places, most = (seeing.double() @ of_row).unbind(-1)
    entropy = torch.where(seeing, trace.rows.entropy, 0.0).sum(-1, dtype=torch.float64)
    return RowTotals(many, places, most, entropy)


def _of_row(x: AttentionInputs) -> Float[Tensor, "#b q 3"]:
    """Of each row: 1, its place, and the most that its entropy could be."""
    most = open_places(x).clamp_min(1).double().log()[:, 0]
    place = torch.arange(x.shape.Q, device=x.q.device) + (x.shape.K - x.shape.Q)
    return torch.stack(torch.broadcast_tensors(torch.ones_like(most), place.double(), most), -1)
