"""Plain calls of training that come again: both passes are made ready once, as in
`prepared_call.py`. Without that, a short call takes several times as long in Python as in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.backends.called_forms import Held, Way
from regard.backends.contract import Repeated, Rows
from regard.backends.passes import Pull as Pulls
from regard.backends.tiled.call_memory import borrow, empty, give_back
from regard.backends.tiled.fused import described
from regard.backends.tiled.laid_bias import NO_BIAS
from regard.backends.tiled.loop import AGAIN, PULL_AGAIN, Pull
from regard.backends.tiled.operators import learning, passes
from regard.backends.tiled.pieces import Lot, in_rows, lots, pieces
from regard.backends.tiled.prepared_call import Kind, kind_of
from regard.cancellation import step
from regard.inputs import AttentionInputs

_FLOAT = torch.float32
_NOTHING = (0,), (1,), _FLOAT
"""In the place of statistics that nobody asked for."""


def prepared_to_learn(x: AttentionInputs, *, statistics: bool) -> Repeated | None:
    """How calls of this one's kind run, whose queries, keys or values learn; None where each of
    them must be looked at."""
    if {x.q.dtype, x.k.dtype, x.v.dtype} != {_FLOAT}:
        # Half precision on a CPU is seldom trained in, and what is copied takes most of its time.
        return None
    kind = None if x.bias is not None else kind_of(x)
    if kind is None:
        return None
    rest = x.beside_tensors()
    way = Way(Forward(kind, x, statistics=statistics), Backward(kind, x), Held(x))

    def again(q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        rows = learning(way, rest, q, k, v)
        return rows if statistics else rows.out

    return again


class Forward:
    """The forward pass of a kind."""

    def __init__(self, kind: Kind, x: AttentionInputs, *, statistics: bool) -> None:
        B, H, Q, E = (*x.q.shape[:3], x.v.shape[3])
        self._kind, self._rest, self._statistics = kind, x.beside_tensors(), statistics
        self._out = (B, H, Q, E), (H * Q * E, Q * E, E, 1), _FLOAT
        self._row = (B, H, Q), (H * Q, Q, 1), _FLOAT
        self._tiles = -(-Q // kind.plan.rows)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Rows, Tensor]:
        kind = self._kind
        if not kind.is_usable:
            return self._plainly(q, k, v)
        out, lse, rest = empty(*self._out), empty(*self._row), empty(*self._row)
        more = self._row if self._statistics else _NOTHING
        largest, entropy = empty(*more), empty(*more)
        memory = borrow(kind.size)
        given = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), largest.data_ptr(),
            entropy.data_ptr(), lse.data_ptr(), rest.data_ptr(), memory.address, 0,
            *NO_BIAS, kind.plan.threads,
        )  # fmt: skip
        for lot, _, shared in kind.parts:
            step(lot.first, self._tiles)
            if not kind.loop.attend_again(AGAIN.pack(shared, *given)):
                return self._plainly(q, k, v)
        give_back(memory, kind.size)
        return Rows(out, lse, largest, entropy), rest

    def _plainly(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Rows, Tensor]:
        x = AttentionInputs(q, k, v, *self._rest)
        return passes.forward(x, statistics=self._statistics)


class Backward:
    """The backward pass of a kind, for gradients of the output; those of statistics take the whole
    path."""

    def __init__(self, kind: Kind, x: AttentionInputs) -> None:
        plan = kind.plan
        B, H, Q, K, G, D, E = plan[:7]
        hands = plan.hands
        self._kind, self._hands, self._size = kind, hands, plan.backward_scratch * _FLOAT.itemsize
        many = (hands,) if hands > 1 else ()
        shapes = ((B, H, Q, D), (*many, B, G, K, D), (*many, B, G, K, E))
        self._made = [(shape, _strides(shape), _FLOAT) for shape in shapes]
        row = _strides((B, H, Q))
        self._lie = (
            *(t.stride() for t in (x.q, x.k, x.v)), _strides((B, H, Q, E)), row, row,
        )  # fmt: skip
        (piece,) = pieces(x, plan)
        fields = described(x, kind.loop, piece, plan, x.q.new_empty(plan.threads), None) | {
            "scratch_step": plan.backward_scratch // plan.threads,
            "dk_step": B * G * K * D,
            "dv_step": B * G * K * E,
            "key_heads": G,
            "hands": hands,
        }
        self._parts: list[tuple[Lot, Pull, int]] = []
        for lot in lots(piece, plan):
            shared = Pull(**fields, fresh=not self._parts)
            lot.put(shared)
            self._parts.append((lot, shared, ctypes.addressof(shared)))

    def __call__(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pulls
    ) -> Sequence[Tensor]:
        kind, g = self._kind, pull.out
        q, k, v, out, lse = x.q, x.k, x.v, rows.out, rows.lse
        lie = q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(), kept.stride()
        is_float = {q.dtype, k.dtype, v.dtype, out.dtype, lse.dtype, kept.dtype} == {_FLOAT}
        if (
            g is None
            or pull.lse is not None
            or pull.entropy is not None
            or not kind.is_usable
            # Hooks on saved tensors may give them back in another layout, or type.
            or lie != self._lie
            or not is_float
        ):
            return passes.backward(x, rows, kept, pull, bias=False)[:3]
        g = in_rows(g)
        dq, dk, dv = (empty(*like) for like in self._made)
        memory = borrow(self._size)
        given = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), out.data_ptr(), lse.data_ptr(),
            kept.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        )  # fmt: skip
        batch, head, row, _ = g.stride()
        for _, _, shared in self._parts:
            step()
            if not kind.loop.pull_again(
                PULL_AGAIN.pack(shared, *given, memory.address, batch, head, row, kind.plan.threads)
            ):
                return passes.backward(x, rows, kept, pull, bias=False)[:3]
        give_back(memory, self._size)
        return (dq, dk, dv) if self._hands == 1 else (dq, dk.sum(0), dv.sum(0))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
