"""Queries and keys compared by a plain dot product, or by a learned bilinear form (Luong)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard import scores
from regard.arguments import counted, flag, refuse_dropout
from regard.calls import dispatch
from regard.errors import RegardError
from regard.masks import Mask
from regard.scores.score import Score
from regard.traces import Trace


class DotAttention(nn.Module):
    """q·k, softmax over the keys, mean of the values; `general=True` learns W in q·W·k.

    One head, no projections, no scale. Without W there are no parameters, and queries and keys
    must be of one width; W may lie between different widths.

    >>> import torch
    >>> from regard import nn
    >>> attention = nn.DotAttention(16, key_width=24, general=True)
    >>> attention(torch.randn(2, 1, 16), torch.randn(2, 7, 24)).shape
    torch.Size([2, 1, 24])
    """

    def __init__(
        self,
        d_model: int,
        *,
        key_width: int | None = None,
        general: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        key_width = d_model if key_width is None else key_width
        counted("d_model", d_model)
        counted("key_width", key_width)
        refuse_dropout(dropout)
        general = flag("general", general)
        if key_width != d_model and not general:
            raise RegardError(
                "a dot product needs queries and keys of one width",
                got=f"d_model={d_model}, key_width={key_width}",
                accepted="the same width",
                do="pass general=True to learn a matrix between them",
            )
        self.d_model, self.dropout = d_model, dropout
        self.W = nn.Parameter(torch.empty(d_model, key_width)) if general else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W anew (Xavier), if there is one.

        >>> DotAttention(4).reset_parameters()
        """
        if self.W is not None:
            nn.init.xavier_uniform_(self.W)

    @property
    def score(self) -> Score:
        """How queries and keys are compared.

        >>> DotAttention(4).score
        dot()
        """
        return scores.dot() if self.W is None else scores.general(self.W)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m e"] | None = None,
        values: Float[Tensor, "b m f"] | None = None,
        *,
        mask: Mask | None = None,
        trace: bool = False,
    ) -> Float[Tensor, "b n w"] | tuple[Float[Tensor, "b n w"], Trace]:
        """x attends to itself, or to `memory`, whose `values` are itself unless said."""
        k = x if memory is None else memory
        v = k if values is None else values
        how: dict[str, Any] = {
            "mask": mask, "score": self.score, "dropout": self.dropout, "training": self.training
        }  # fmt: skip
        if trace:
            seen = dispatch.trace(x, k, v, **how)
            return seen.out, seen
        return dispatch.attention(x, k, v, **how)

    def extra_repr(self) -> str:
        """The form, for print(module).

        >>> DotAttention(4, general=True).extra_repr()
        'q·W·k, W 4×4'
        """
        return "q·k" if self.W is None else "q·W·k, W {}×{}".format(*self.W.shape)
