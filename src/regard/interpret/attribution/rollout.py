"""Attention rollout: which tokens the rows of the last layer are mixed of, if attention only mixed.

Each layer mixes rows with Ã = (A + I) / (its row sums), A the mean of the heads and I the residual
stream (½ each where the weights of a row add up to 1). The rows of Ã_L ⋯ Ã_1 that are asked for are
vectors that go through the layers from above, a few rows of weights at a time: no n×n.
(Abnar and Zuidema, 2020.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.attribution.pair_scores import blocks
from regard.traces import Trace


def rollout(traces: Sequence[Trace], queries: Int[Tensor, "r"]) -> Float[Tensor, "b r k"]:
    """The rows of the rollout of calls, first layer first."""
    B, _, n, _ = refuse_other_places(traces)
    x = traces[-1].inputs
    shares = torch.zeros(B, len(queries), n, dtype=x.compute_dtype, device=x.q.device)
    shares[:, torch.arange(len(queries)), queries] = 1
    for trace in reversed(traces):
        mixed = torch.zeros_like(shares)
        for some in blocks(trace, torch.arange(n, device=x.q.device)):
            weights = mean_of_heads(trace, some)
            part = shares[:, :, some] / (1 + weights.sum(-1))[:, None]
            mixed += part @ weights
            mixed[:, :, some] += part
        shares = mixed
    return shares


def mean_of_heads(trace: Trace, queries: Int[Tensor, "r"]) -> Float[Tensor, "b r k"]:
    """The weights of some rows, the mean over heads."""
    x = trace.inputs
    return trace.weights(queries=queries).mean(1).to(x.compute_dtype)


def refuse_other_places(traces: Sequence[Trace]) -> tuple[int, int, int, int]:
    """All layers mix the same places."""
    shapes = {(t.inputs.shape.B, t.inputs.shape.Q, t.inputs.shape.K) for t in traces}
    B, Q, K = next(iter(shapes))
    if len(shapes) > 1 or Q != K:
        raise RegardError(
            "layers are multiplied if all of them mix the same places",
            got=" and ".join(f"{q} queries over {k} keys" for _, q, k in sorted(shapes)),
            accepted="self-attention of one text, read at once",
            do="name layers of one kind in layers=",
        )
    return B, traces[0].inputs.shape.H, Q, K
