"""The passes as operators run them: compiled programs call the same few kinds again and again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.passes import Call, Given, Operated, Passes, Pull
from regard.backends.triton.replay import RepeatedPass, RepeatedPull
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.values import Value

_ROOM = 1024
"""Kinds of calls that are remembered."""
T = TypeVar("T")


class Replayed(Operated):
    """Each kind of call is decided and checked once, then replayed."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        self._forward: dict[Hashable, RepeatedPass] = {}
        self._backward: dict[Hashable, RepeatedPull] = {}

    def forward(self, call: Call, x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
        kind = _kind(call, x)
        known = self._forward.get((kind, statistics))
        if known is None:
            if kind is None or not _in_numbers(x):
                return super().forward(call, x, statistics=statistics)
            known = RepeatedPass(self.passes, x.beside_tensors(), statistics)
            _keep(self._forward, (kind, statistics), known)
        rows, kept = known(x.q, x.k, x.v)
        if not statistics:
            # Replayed calls share a tensor in the place of what nobody asked for, but each output
            # of an operator is its own: autograd writes on it.
            rows = Rows(rows.out, rows.lse, rows.lse.new_empty(0), rows.lse.new_empty(0))
        return rows, kept

    def backward(
        self, call: Call, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool
    ) -> Given:
        kind = _kind(call, x)
        known = self._backward.get(kind)
        if known is None:
            if kind is None or not _in_numbers(x):
                return super().backward(call, x, rows, kept, pull, bias=bias)
            known = RepeatedPull(self.passes)
            _keep(self._backward, kind, known)
        dq, dk, dv = known(x, rows, kept, pull)
        return Given(dq, dk, dv, None, [], [])


def _keep(into: dict[Hashable, T], kind: Hashable, known: T) -> None:
    if len(into) >= _ROOM:
        into.clear()
    into[kind] = known


def _in_numbers(x: AttentionInputs) -> bool:
    """Whether a call is all in q, k, v and numbers. Lists of a mask's tiles would be made where a
    CUDA graph's memory is, which others write to later."""
    return (
        isinstance(x.comparison, Dot)
        and x.bias is None
        and (x.mask is None or (x.mask.band() is not None and not x.mask.tensors()))
    )


def _kind(call: Call, x: AttentionInputs) -> Hashable | None:
    """All that decides how a call is run, of one that may be in numbers alone; else None."""
    text, integers, floats, softcap, dropout = call.told
    q = x.q
    if (
        x.sink is not None
        or dropout
        or '"tensor"' in text
        or '"local"' in text
        or torch.is_autocast_enabled(q.device.type)
        or (q.is_cuda and q.get_device() != torch.cuda.current_device())
    ):
        return None
    return (
        text, tuple(integers), tuple(floats), softcap, Value.kinds_made, q.get_device(),
        torch.are_deterministic_algorithms_enabled(),
        *[(t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in (q, x.k, x.v)],
    )  # fmt: skip
