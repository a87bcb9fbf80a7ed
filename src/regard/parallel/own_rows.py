"""What the queries of one rank saw of all keys."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows


class OwnRows:
    """Answers that need no computation, by the names that a `Trace` has for them."""

    rows: Rows

    @property
    def out(self) -> Float[Tensor, "b h n e"]:
        """The output for this rank's queries. Differentiable."""
        return self.rows.out

    @property
    def lse(self) -> Float[Tensor, "b h n"]:
        """log Σ exp(logit) over the keys of all ranks. Differentiable."""
        return self.rows.lse

    @property
    def max_logit(self) -> Float[Tensor, "b h n"]:
        """The largest logit of each row. Differentiable."""
        return self.rows.max_logit

    @property
    def entropy(self) -> Float[Tensor, "b h n"]:
        """-Σ p log p of each row in nats. Differentiable."""
        return self.rows.entropy
