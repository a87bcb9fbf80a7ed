"""A small network decides how well a query and a key go together (Bahdanau)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard import scores
from regard.arguments import counted, refuse_dropout
from regard.calls import dispatch
from regard.masks import Mask
from regard.traces import Trace


class AdditiveAttention(nn.Module):
    """w·tanh(q Wq + k Wk), softmax over the keys, mean of the values.

    One head. Values are used as they come. Queries are d_model wide, keys `key_width` (d_model
    unless said), and the network between them has `hidden` units (d_model unless said).

    >>> import torch
    >>> from regard import masks, nn
    >>> attention = nn.AdditiveAttention(16, key_width=24, hidden=8)
    >>> state, encoded = torch.randn(2, 1, 16), torch.randn(2, 7, 24)
    >>> attention(state, encoded, mask=masks.padding([7, 4])).shape
    torch.Size([2, 1, 24])
    """

    def __init__(
        self,
        d_model: int,
        *,
        key_width: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = d_model if hidden is None else hidden
        key_width = d_model if key_width is None else key_width
        for name, width in (("d_model", d_model), ("key_width", key_width), ("hidden", hidden)):
            counted(name, width)
        refuse_dropout(dropout)
        self.dropout = dropout
        self.Wq = nn.Parameter(torch.empty(d_model, hidden))
        self.Wk = nn.Parameter(torch.empty(key_width, hidden))
        self.w = nn.Parameter(torch.empty(hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the network anew (Xavier).

        >>> attention = AdditiveAttention(4)
        >>> attention.reset_parameters()
        """
        nn.init.xavier_uniform_(self.Wq)
        nn.init.xavier_uniform_(self.Wk)
        nn.init.xavier_uniform_(self.w[None])

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
            "mask": mask,
            "score": scores.additive(self.Wq, self.Wk, self.w),
            "dropout": self.dropout,
            "training": self.training,
        }
        if trace:
            seen = dispatch.trace(x, k, v, **how)
            return seen.out, seen
        return dispatch.attention(x, k, v, **how)

    def extra_repr(self) -> str:
        """The widths, for print(module).

        >>> AdditiveAttention(4, hidden=3).extra_repr()
        'query 4, key 4, hidden 3'
        """
        (dq, hidden), (dk, _) = self.Wq.shape, self.Wk.shape
        return f"query {dq}, key {dk}, hidden {hidden}"
