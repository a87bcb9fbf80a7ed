"""Words attend to each other by their own vectors: attention before anything is learned."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regard import scores
from regard.calls import dispatch
from regard.masks import Mask
from regard.scores.score import finite_scale
from regard.traces import Trace


class StaticAttention(nn.Module):
    """softmax(scale · x xᵀ) x, without parameters.

    Scores are symmetric: without projections, what a word seeks is what it offers. Learned
    projections exist to break this symmetry.

    >>> import torch
    >>> from regard import nn
    >>> buy, apple, phone = [1.0, 1.0], [2.0, 2.0], [0.0, 4.0]
    >>> y, seen = nn.StaticAttention()(torch.tensor([[buy, apple, phone]]), trace=True)
    >>> seen.weights(queries=[1])
    tensor([[[0.0091, 0.4955, 0.4955]]])
    >>> y[0, 1]
    tensor([1.0000, 2.9819])
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = finite_scale(scale)

    def forward(
        self, x: Float[Tensor, "b n d"], *, mask: Mask | None = None, trace: bool = False
    ) -> Float[Tensor, "b n d"] | tuple[Float[Tensor, "b n d"], Trace]:
        """x attends to itself."""
        if trace:
            seen = dispatch.trace(x, x, x, mask=mask, score=scores.dot(), scale=self.scale)
            return seen.out, seen
        return dispatch.attention(x, x, x, mask=mask, score=scores.dot(), scale=self.scale)

    def extra_repr(self) -> str:
        """The scale, for print(module).

        >>> StaticAttention(0.5).extra_repr()
        'scale=0.5'
        """
        return f"scale={self.scale}"
