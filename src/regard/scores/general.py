"""A learned bilinear form between queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.arguments import refuse_no_tensor
from regard.errors import RegardError
from regard.scores.comparison import Dot
from regard.scores.score import Prepared, Score, finite_scale, per_head


@dataclass(frozen=True, eq=False, repr=False)
class General(Score):
    """q·W·k"""

    W: Tensor

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        W = self.W.to(q.dtype)
        per_head(W, 2, q.shape[1], "general: W")
        if W.shape[-2] != q.shape[-1] or W.shape[-1] != k.shape[-1]:
            raise RegardError(
                "general: W does not lie between these queries and keys",
                got=f"W {list(W.shape)}, q {q.shape[-1]} wide, k {k.shape[-1]} wide",
                accepted=f"[{q.shape[-1]}, {k.shape[-1]}], or one such matrix per head",
            )
        return q @ W, k, Dot(1.0 if scale is None else finite_scale(scale))


def general(W: Float[Tensor, "*h dq dk"]) -> Score:
    """q·W·k with a learned matrix (Luong), shared or one per head; widths may differ.

    >>> import regard, torch
    >>> q, k, W = torch.ones(1, 2), torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 2, 0]])
    >>> regard.trace(q, k, k, score=general(W)).weights()
    tensor([[0.2447, 0.6652, 0.0900]])
    """
    refuse_no_tensor("general: W", W, "[query width, key width], or one such matrix per head")
    return General(W)
