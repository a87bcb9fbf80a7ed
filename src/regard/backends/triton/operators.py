"""The kernels as operators of torch.library."""

from __future__ import annotations

from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.operators import Given, Pull, register
from regard.backends.triton.arguments import on_card
from regard.backends.triton.backward import backward
from regard.backends.triton.forward import empty_out, forward
from regard.inputs import AttentionInputs


def _forward(x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
    with on_card(x.q):
        return forward(x, statistics=statistics)


def _backward(x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool) -> Given:
    with on_card(x.q):
        return backward(x, rows, kept, pull, bias=bias)


def _kept(lse: Tensor) -> Tensor:
    return lse.new_empty(2, *lse.shape)


run = register("triton", _forward, _backward, _kept, empty_out)
