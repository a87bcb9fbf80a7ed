"""The kernels as operators of torch.library."""

from __future__ import annotations

from torch import Tensor

from regard.backends.operators import register
from regard.backends.triton.backward import backward
from regard.backends.triton.forward import empty_out, forward


def _kept(lse: Tensor) -> Tensor:
    return lse.new_empty(2, *lse.shape)


run = register("triton", forward, backward, _kept, empty_out)
