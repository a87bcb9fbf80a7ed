"""A small network that looks at query and key together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.arguments import refuse_no_tensor
from regard.errors import RegardError
from regard.scores.comparison import TanhSum
from regard.scores.score import Prepared, Score, apart, per_head


@dataclass(frozen=True, eq=False, repr=False)
class Additive(Score):
    """w·tanh(q Wq + k Wk)"""

    Wq: Tensor
    Wk: Tensor
    w: Tensor

    def prepare(self, q: Tensor, k: Tensor, scale: float | None) -> Prepared:
        self._refuse_scale(scale)
        Wq, Wk = self.Wq.to(q.dtype), self.Wk.to(k.dtype)
        per_head(Wq, 2, q.shape[1], "additive: Wq")
        per_head(Wk, 2, k.shape[1], "additive: Wk")
        per_head(self.w, 1, q.shape[1], "additive: w")
        widths = (Wq.shape[-2:], Wk.shape[-2:], self.w.shape[-1:])
        hidden = self.w.shape[-1]
        if widths[0] != (q.shape[-1], hidden) or widths[1] != (k.shape[-1], hidden):
            raise RegardError(
                "additive: the matrices do not fit",
                got=f"Wq {list(Wq.shape)}, Wk {list(Wk.shape)}, w {list(self.w.shape)} "
                f"for q {q.shape[-1]} wide, k {k.shape[-1]} wide",
                accepted="Wq [query width, hidden], Wk [key width, hidden], w [hidden]",
            )
        return _through(q, Wq), _through(k, Wk), TanhSum(self.w)


def _through(x: Tensor, W: Tensor) -> Tensor:
    broken, x = apart(x)
    return (x @ W).masked_fill(broken, math.nan)


def additive(
    Wq: Float[Tensor, "*h dq a"], Wk: Float[Tensor, "*g dk a"], w: Float[Tensor, "*hw a"]
) -> Score:
    """w·tanh(q Wq + k Wk) (Bahdanau): widths may differ; matrices are shared or one per head.

    >>> import regard, torch
    >>> q, k = torch.tensor([[1.0]]), torch.tensor([[-1.0], [0.0], [1.0]])
    >>> one = torch.ones(1, 1)
    >>> regard.trace(q, k, k, score=additive(one, one, torch.ones(1))).weights()
    tensor([[0.1735, 0.3716, 0.4549]])
    """
    axes = "Wq [query width, hidden], Wk [key width, hidden], w [hidden]"
    for name, given in (("Wq", Wq), ("Wk", Wk), ("w", w)):
        refuse_no_tensor(f"additive: {name}", given, axes)
    return Additive(Wq, Wk, w)
