"""A backend's passes as functions that every transform of PyTorch knows: gradients, forward mode,
vmap, and any of them inside another.

Each function hands on to another, so that transforms may be nested: the gradient of `Attend` is
`AttendVjp`, its tangent `AttendJvp`. Those two have no derivative and refuse one. vmap turns a
function into itself with fewer axes (vmap_entries.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.passes import Call, Passes, Pull
from regard.backends.vmap_entries import Lot, each, lots
from regard.between_graphs import between_graphs
from regard.errors import RegardError
from regard.transforms import is_batched

UNCOMPILED = (
    "regard's operators have no forward mode and no batching rule inside a compiled graph: compile "
    'the function without fullgraph=True, or pass backend="reference"'
)
Tensors = Sequence[Tensor | None]


_LIBRARY = torch.library.Library("regard", "FRAGMENT")
_MOST = 16
"""Tensors that are learned in one call: q, k, v, sink, one of a comparison, and those of a bias."""
_LIBRARY.define(
    f"one_by_one({', '.join(f'Tensor? t{i}' for i in range(_MOST))}, int key)"
    f" -> ({', '.join(['Tensor'] * _MOST)})"
)
_RUNNING: dict[int, Callable[..., list[Tensor]]] = {}


@torch.library.impl(_LIBRARY, "one_by_one", "CompositeExplicitAutograd")
def _entry(*operands: Any) -> tuple[Tensor, ...]:
    *tensors, key = operands
    found = _RUNNING[key](*tensors)
    return *found, *(torch.empty(0) for _ in range(_MOST - len(found)))


def one_by_one(
    run: Callable[..., list[Tensor]], operands: Tensors, many: int
) -> list[Tensor] | tuple[Tensor, ...]:
    """What a pass gives, one entry after the other where autograd has batched its gradients: the
    older vmap, which it does that by, takes an operator without a rule apart. (It cannot do so with
    one that takes lists, so what does not change comes by another way.)"""
    if not any(map(is_batched, operands)):
        return run(*operands)
    n = len(operands)
    if max(n, many) > _MOST:
        raise RegardError(
            "batched gradients and tangents are known for a number of tensors",
            got=f"{max(n, many)} that are learned",
            accepted=f"{_MOST} at most",
            do="ask for one after the other, or use torch.func.vmap",
        )
    key = id(run)
    _RUNNING[key] = lambda *tensors: run(*tensors[:n])
    try:
        found = torch.ops.regard.one_by_one(*operands, *(None,) * (_MOST - n), key)
    finally:
        del _RUNNING[key]
    return tuple(found[:many])


class Attend(torch.autograd.Function):
    """The forward pass: out, lse, max_logit, entropy, and what is kept."""

    @staticmethod
    def forward(
        passes: Passes, call: Call, statistics: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows, kept = passes.forward(call.inputs(*tensors), statistics=statistics)  # type: ignore[arg-type]
        return *rows, kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        passes, call, statistics, *tensors = inputs
        out, lse, max_logit, entropy, kept = output
        ctx.call = passes, call, statistics
        saved = (out, lse, entropy, kept, *tensors)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_logit, kept, *(() if statistics else (entropy,)))

    @staticmethod
    @between_graphs(UNCOMPILED)
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        g_out, g_lse, _, g_entropy, _ = grad_outputs
        passes, call, _ = ctx.call
        _, _, _, _, *tensors = saved = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[3:])
        if g_out is None and g_lse is None and g_entropy is None:
            return None, None, None, *(None for _ in tensors)
        given = iter(AttendVjp.apply(passes, call, wanted, g_out, g_lse, g_entropy, *saved))  # type: ignore[no-untyped-call]
        return None, None, None, *(next(given) if want else None for want in wanted)

    @staticmethod
    @between_graphs(UNCOMPILED)
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        passes, call, statistics = ctx.call
        moved = tangents[3:]
        out, lse, entropy = AttendJvp.apply(passes, call, statistics, *moved, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return out, lse, None, entropy if statistics else None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *operands: Any) -> Any:
        passes, call, statistics, *tensors = operands
        found = lots(call, tensors, axes[3:], info.batch_size)

        def answer(lot: Lot) -> list[Tensor]:
            *rows, kept = Attend.apply(passes, lot.call, statistics, *lot.tensors)  # type: ignore[no-untyped-call]
            return [*map(lot.restored, rows), lot.restored(kept, kept.ndim - 3)]

        return each(found, answer)


class AttendVjp(torch.autograd.Function):
    """Gradients of the tensors that want one, from gradients of out, lse and entropy."""

    @staticmethod
    def forward(
        passes: Passes, call: Call, wanted: tuple[bool, ...], *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        grad_outputs, (out, lse, entropy, kept), tensors = operands[:3], operands[3:7], operands[7:]
        assert out is not None
        assert lse is not None
        assert entropy is not None
        assert kept is not None
        x = call.inputs(*tensors)  # type: ignore[arg-type]
        added = [] if x.bias is None else x.bias.tensors()
        learns_bias = any(wanted[len(wanted) - len(added) :])

        def vjp_of(*grad_outputs: Tensor | None) -> list[Tensor]:
            has_entropy = entropy.numel() == lse.numel()
            given = passes.backward(
                x,
                Rows(out, lse, lse, entropy),
                kept,
                Pull(grad_outputs[0], grad_outputs[1], grad_outputs[2] if has_entropy else None),
                bias=learns_bias,
            )
            gradients = [given.q, given.k, given.v, given.sink, None, *given.own(x)]
            return [
                g.to(t.dtype)
                for g, t in zip(_chosen(gradients, wanted), _chosen(tensors, wanted), strict=True)
                if g is not None and t is not None
            ]

        return tuple(one_by_one(vjp_of, grad_outputs, sum(wanted)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        refuse_second(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        refuse_second(ctx.name)

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *operands: Any) -> Any:
        passes, call, wanted, *rest = operands
        axes = axes[3:]
        # What is shared by a batch has one gradient for all of it, but entries have one each.
        alone = any(wanted[3:])
        found = lots(call, rest[7:], axes[7:], info.batch_size, alone=alone)

        def answer(lot: Lot) -> list[Tensor]:
            rows = map(lot.rows, rest[:6], axes[:6])
            kept = lot.kept(rest[6], axes[6])
            given = AttendVjp.apply(passes, lot.call, wanted, *rows, kept, *lot.tensors)  # type: ignore[no-untyped-call]
            return [*map(lot.restored, given)]

        return each(found, answer)


class AttendJvp(torch.autograd.Function):
    """Tangents of out, lse and entropy, from tangents of the tensors (None where one has none)."""

    @staticmethod
    def forward(
        passes: Passes, call: Call, statistics: bool, *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        tangents, (out, lse, entropy, kept), tensors = _parted(operands)
        assert out is not None
        assert lse is not None
        assert entropy is not None
        assert kept is not None
        x = call.inputs(*tensors)
        places = [i for i, t in enumerate(tangents) if t is not None]

        def jvp_of(*moved: Tensor | None) -> list[Tensor]:
            every = [
                torch.zeros_like(t) if t is not None and t.is_floating_point() else t
                for t in tensors
            ]
            for i, t in zip(places, moved, strict=True):
                every[i] = t
            rows = Rows(out, lse, lse, entropy)
            at = call.inputs(*every)
            return list(passes.jvp(x, rows, kept, at, statistics=statistics))

        return tuple(one_by_one(jvp_of, [tangents[i] for i in places], 3))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        passes, _, statistics, *_ = inputs
        ctx.name = passes.name
        if not statistics:
            ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        refuse_second(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        refuse_second(ctx.name)

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *operands: Any) -> Any:
        passes, call, statistics, *rest = operands
        tangents, rows, tensors = _parted(rest)
        tangent_axes, row_axes, tensor_axes = _parted(axes[3:])
        alone = any(t is not None for t in tangents[3:])
        found = lots(call, tensors, tensor_axes, info.batch_size, alone=alone)

        def answer(lot: Lot) -> list[Tensor]:
            moved = map(lot.rows, tangents, tangent_axes)
            given = *map(lot.rows, rows[:3], row_axes[:3]), lot.kept(rows[3], row_axes[3])
            found = AttendJvp.apply(passes, lot.call, statistics, *moved, *given, *lot.tensors)  # type: ignore[no-untyped-call]
            return [*map(lot.restored, found)]

        return each(found, answer)


def refuse_second(name: str) -> None:
    """Say who can differentiate a derivative."""
    raise RegardError(
        f"the {name} backend is differentiable once",
        got="a derivative of a derivative",
        accepted='backend="reference", which can be differentiated any number of times',
        do='pass backend="reference" to the call whose second derivative you need',
    )


def _chosen(values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return list(itertools.compress(values, wanted))


def _parted(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Tangents, the four tensors that the forward pass gave, and the call's own tensors."""
    n = (len(operands) - 4) // 2
    return operands[:n], operands[n : n + 4], operands[n + 4 :]
