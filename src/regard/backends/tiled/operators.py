"""The tiled passes as operators of torch.library."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.operators import Given, Pull, register
from regard.backends.tiled.backward import Backward
from regard.backends.tiled.forward import forward
from regard.backends.tiled.fused import Passed
from regard.inputs import AttentionInputs


def _backward(x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool) -> Given:
    done = Backward(x, Passed(rows, kept), pull.out, pull.lse, pull.entropy, bias=bias).run()
    return Given(done.q, done.k, done.v, done.sink, done.comparison, done.bias)


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


run = register("tiled", forward, _backward, torch.empty_like, _empty_out)
