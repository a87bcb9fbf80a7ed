"""What each row of a call did: a number per row and statistic, from blocks of weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from regard.interpret.head_scores.pairs.weight_blocks import Block, distances
from regard.interpret.head_scores.texts.sides import Sides
from regard.traces import Trace

FROM_WEIGHTS = ("first", "distance")
"""Statistics for which the weights are computed once more; the others come with the forward pass.
"""


class RowStatistics:
    """Of one call. Those that need weights grow block by block."""

    def __init__(self, trace: Trace, sides: Sides, names: tuple[str, ...]) -> None:
        self.trace, self.sides, self.names = trace, sides, names
        rows = trace.rows
        self.found: dict[str, Tensor] = {}
        if "entropy" in names:
            self.found["entropy"] = rows.entropy.double()
        if "max_logit" in names:
            self.found["max_logit"] = rows.max_logit.double()
        if "norm" in names:
            self.found["norm"] = rows.out.double().norm(dim=-1)
        for name in FROM_WEIGHTS:
            if name in names:
                self.found[name] = torch.zeros_like(rows.lse, dtype=torch.float64)

    @property
    def needs_weights(self) -> bool:
        return any(name in self.names for name in FROM_WEIGHTS)

    def add(self, block: Block) -> None:
        q, k, w = block
        if "first" in self.names:
            # Where a window ends before the first token, it has no weight.
            at = (self.sides.key.first - k[0]).view(-1, 1, 1, 1)
            inside = (at >= 0) & (at < len(k))
            weight = w.gather(-1, at.clamp(0, len(k) - 1).expand(*w.shape[:-1], 1))
            self.found["first"][..., q] = (weight * inside)[..., 0].double()
        if "distance" in self.names:
            away = (w * distances(self.trace.inputs, block)).sum(-1)
            self.found["distance"][..., q] = away.double()

    def values(self) -> Float[Tensor, "s b h q"]:
        """In the order of their names."""
        lse = self.trace.rows.lse
        if not self.names:
            return lse.new_zeros(0, *lse.shape, dtype=torch.float64)
        return torch.stack([self.found[name] for name in self.names])
