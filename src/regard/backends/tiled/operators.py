"""The tiled passes as operators of torch.library."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.operators import register
from regard.backends.passes import Given, Moved, Passes, Pull
from regard.backends.tiled.backward import Backward
from regard.backends.tiled.forward import forward
from regard.backends.tiled.fused import Passed
from regard.backends.tiled.jvp import jvp
from regard.inputs import AttentionInputs


def _backward(x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool) -> Given:
    done = Backward(x, Passed(rows, kept), pull.out, pull.lse, pull.entropy, bias=bias).run()
    return Given(done.q, done.k, done.v, done.sink, done.comparison, done.bias)


def _jvp(
    x: AttentionInputs, rows: Rows, kept: Tensor, moved: AttentionInputs, *, statistics: bool
) -> Moved:
    return jvp(x, Passed(rows, kept), moved, statistics=statistics)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


passes = Passes("tiled", forward, _backward, _jvp)
run, learning, _ = register(passes, torch.empty_like, empty_out)
