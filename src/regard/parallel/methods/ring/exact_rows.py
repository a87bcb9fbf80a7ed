"""Rows whose logits are too large for float32, where a rank never sees all keys of a row.

On one device such a call is repeated in float64, with a log-sum-exp computed again from all its
keys (`regard.backends.exactness`). A block has only some of the keys: it would compute the sum of
these alone, and the weights of every block would add up to 1. So ranks decide together, and the
sums over all keys are computed by one more pass around the ring.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.exactness import SURE, as_found
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.parallel.collectives import largest
from regard.parallel.merge import merge, rows_of_sink
from regard.parallel.methods.ring.block_questions import OfRows
from regard.parallel.methods.ring.ring_pass import RingPass
from regard.parallel.ranks import Ranks
from regard.scores.comparison import longest


def exact_lse(x: AttentionInputs, lse: Float[Tensor, "b h n"], ring: RingPass) -> Tensor | None:
    """The lse of the same rows in float64, without gradients; None if what they have will do. All
    ranks must ask."""
    size = _largest_sum(x, lse, ring.blocks.ranks)
    if size * torch.finfo(torch.float64).eps > SURE:
        raise RegardError(
            "these logits are too large to compute weights block by block",
            got=f"sums of up to {size:.3g}",
            accepted=f"up to {SURE / torch.finfo(torch.float64).eps:.3g} with method='ring'",
            do="method='all_gather' or method='ulysses'",
        )
    if x.q.dtype == torch.float64 or size * torch.finfo(torch.float32).eps <= SURE:
        return None
    with torch.inference_mode(False), torch.no_grad():
        wide = widened(x.map_tensors(Tensor.detach))
        rows = Rows(*ring.ask(OfRows(None), wide, None))
        if wide.sink is not None:
            rows = merge(rows, rows_of_sink(wide.sink, rows))
        return as_found(rows.lse, lse.detach())


def widened(x: AttentionInputs) -> AttentionInputs:
    """The call in float64, without values, which weights do not need."""
    q, k, v = (t.to(torch.float64) for t in (x.q, x.k, x.v[..., :0]))
    return replace(x, q=q, k=k, v=v)


def _largest_sum(x: AttentionInputs, lse: Tensor, ranks: Ranks) -> float:
    """A bound on what is added up for any logit of any rank."""
    own = [longest(x.q.detach()), longest(x.k.detach()), longest(lse.detach()[..., None])]
    q, k, far = largest(ranks, torch.tensor(own, dtype=torch.float64, device=x.q.device)).tolist()
    bound = x.comparison.largest_sum(_one_vector(x.q, q), _one_vector(x.k, k))
    return bound + (far if x.bias is not None or x.sink is not None else 0.0)


def _one_vector(like: Tensor, length: float) -> Float[Tensor, "1 1 1 d"]:
    vector = like.new_zeros(1, 1, 1, like.shape[-1], dtype=torch.float64)
    vector[..., :1] = length
    return vector
