"""The passes of a backend that keeps row statistics: forward, backward, and forward mode.

What goes in and out of them, whoever runs them: autograd, the compiler's operators, `torch.func`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.inputs import AttentionInputs, in_memory
from regard.values import Value, decode, encode


class Given(NamedTuple):
    """Gradients of everything a call can learn; no `bias` where none was asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    comparison: list[Tensor]
    bias: list[Tensor]

    def own(self, x: AttentionInputs) -> list[Tensor | None]:
        """Gradients of the tensors of comparison, mask and bias; None where there is none."""
        biases = iter(self.bias)
        masks = [] if x.mask is None else x.mask.tensors()
        added = [] if x.bias is None else x.bias.tensors()
        return [
            *self.comparison,
            *(None for _ in masks),
            *(next(biases, None) if t.is_floating_point() else None for t in added),
        ]


class Pull(NamedTuple):
    """Gradients of what a call gave; None where nothing depends on it."""

    out: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None

    def in_memory(self) -> Pull:
        """With the numbers that they stand for in their memory."""
        return Pull(*(None if g is None else in_memory(g) for g in self))


class Moved(NamedTuple):
    """Tangents of what a call gave; that of the entropy is empty where it was not asked for."""

    out: Float[Tensor, "b h q e"]
    lse: Float[Tensor, "b h q"]
    entropy: Float[Tensor, "..."]


@runtime_checkable
class Forward(Protocol):
    """Output and row statistics, and a tensor that the other passes want back."""

    def __call__(self, x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]: ...


@runtime_checkable
class Backward(Protocol):
    """Gradients, from what the forward pass gave (without the largest logit) and kept."""

    def __call__(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool
    ) -> Given: ...


@runtime_checkable
class Jvp(Protocol):
    """Tangents of the rows, from tangents of the inputs: `moved` is the call with a tangent in the
    place of every floating-point tensor."""

    def __call__(
        self,
        x: AttentionInputs,
        rows: Rows,
        kept: Tensor,
        moved: AttentionInputs,
        *,
        statistics: bool,
    ) -> Moved: ...


@dataclass(frozen=True)
class Passes:
    """A backend's passes, run in their own precision whatever autocast is about."""

    name: str
    forward_pass: Forward
    backward_pass: Backward
    forward_mode: Jvp

    def forward(self, x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
        with no_autocast(x.q):
            return self.forward_pass(x, statistics=statistics)

    def backward(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool
    ) -> Given:
        with no_autocast(x.q):
            return self.backward_pass(x, rows, kept, pull.in_memory(), bias=bias)

    def jvp(
        self,
        x: AttentionInputs,
        rows: Rows,
        kept: Tensor,
        moved: AttentionInputs,
        *,
        statistics: bool,
    ) -> Moved:
        with no_autocast(x.q):
            return self.forward_mode(x, rows, kept, moved, statistics=statistics)


class Operated:
    """Passes as operators run them: with the numbers that a call was made with."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def forward(self, call: Call, x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
        return self.passes.forward(x, statistics=statistics)

    def backward(
        self, call: Call, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool
    ) -> Given:
        return self.passes.backward(x, rows, kept, pull, bias=bias)


def no_autocast(q: Tensor) -> AbstractContextManager[Any]:
    kind = q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class Call(NamedTuple):
    """What a call is beside its tensors, in the form that operators take. Its tensors are q, k, v,
    sink, seed, and those of comparison, mask and bias, in this order."""

    told: tuple[str, Sequence[Any], Sequence[Any], float | None, float]
    """What operators receive: text, integers and floats of the values, soft-cap and dropout."""
    values: tuple[Value | None, ...] = ()
    """Those made of functions: the text names these by number, so they must stay."""

    @property
    def dropout(self) -> float:
        return self.told[4]

    def inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        seed: Tensor | None,
        *tensors: Tensor,
    ) -> AttentionInputs:
        text, integers, floats, softcap, dropout = self.told
        if '"tensor"' in text or '"local"' in text or not _plain((*integers, *floats)):
            comparison, mask, bias = decode(text, integers, floats, tensors, here=True)
        else:
            told = text, tuple(integers), tuple(floats)
            comparison, mask, bias = _decoded(*told, kinds=Value.kinds_made)
        return AttentionInputs(
            q, k, v, comparison, mask, bias, softcap, sink, dropout, seed  # type: ignore[arg-type]
        )  # fmt: skip


def _plain(numbers: tuple[Any, ...]) -> bool:
    """Whether they are none of the compiler's, which have no value."""
    return all(type(number) in (int, float) for number in numbers)


@lru_cache(256)
def _decoded(
    text: str, integers: tuple[int, ...], floats: tuple[float, ...], *, kinds: int
) -> list[Value | None]:
    """Values made of numbers alone: all layers and steps of a compiled model have the same. They
    are others once a class of values is defined anew, as in a notebook."""
    return decode(text, integers, floats, (), here=True)


def taken_apart(x: AttentionInputs) -> tuple[Call, list[Tensor | None]]:
    """A call and its tensors."""
    values = (x.comparison, x.mask, x.bias)
    text, integers, floats, tensors = encode(values, here=True)
    local = values if any(v is not None and v.is_local() for v in values) else ()
    call = Call((text, integers, floats, x.softcap, x.dropout), local)
    return call, [x.q, x.k, x.v, x.sink, x.seed, *tensors]


def floating(value: Value | None) -> list[Tensor]:
    """The tensors of a value that may be learned."""
    return [] if value is None else [t for t in value.tensors() if t.is_floating_point()]
