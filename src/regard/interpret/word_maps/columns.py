"""The columns of chosen words, from a trace: nothing else of the weights is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError
from regard.traces import Trace

TILE = 2**22
"""Weights that are computed at once."""


@torch.no_grad()
def word_shares(
    trace: Trace,
    picture: range,
    words: Sequence[Sequence[int]],
    *,
    heads: Sequence[int] | None = None,
    batch: int | None = None,
) -> Float[Tensor, "words b h n"]:
    """The share of each row of the picture that falls on each word: on its tokens together.

    `words` are places among the keys. Work and memory are O(rows × tokens of the words).

    >>> import regard
    >>> x = torch.zeros(1, 1, 4, 8)
    >>> word_shares(regard.trace(x, x, x), range(2), [(0,), (1, 3)])[:, 0, 0]
    tensor([[0.2500, 0.2500],
            [0.5000, 0.5000]])
    """
    if trace.inputs.rank != 4:
        raise RegardError(
            "maps are made of calls that have heads",
            got=f"a trace of {trace.inputs.rank}-D inputs",
            accepted="one of inputs [B, H, N, D]",
        )
    B, H = trace.inputs.shape[:2]
    if batch is not None:
        if not -B <= batch < B:
            raise RegardError(
                "no such sequence in the batch", got=str(batch), accepted=f"{-B} to {B - 1}"
            )
        trace = trace[batch % B : batch % B + 1]
    if heads is not None:
        if not heads or not all(-H <= head < H for head in heads):
            raise RegardError("no such head", got=str(list(heads)), accepted=f"{-H} to {H - 1}")
        trace = trace[:, list(heads)]
    keys = sorted({place for word in words for place in word})
    belongs = torch.tensor([[float(key in word) for key in keys] for word in words])
    B, H = trace.inputs.shape[:2]
    rows = max(1, TILE // (B * H * len(keys)))
    tiles = []
    for start in range(picture.start, picture.stop, rows):
        weights = trace.weights(queries=range(start, min(start + rows, picture.stop)), keys=keys)
        tiles.append(weights @ belongs.to(weights).mT)
    return torch.cat(tiles, dim=2).permute(3, 0, 1, 2)
