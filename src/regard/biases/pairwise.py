"""A bias made of a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.pair_programs import Code, Program, read, reading
from regard.values import Pick, Shape


@dataclass(frozen=True, eq=False, repr=False)
class Pairwise(Bias):
    """What a function adds to each pair."""

    function: Callable[..., Any]

    @reading
    def bind(self, shape: Shape, device: torch.device) -> Bias:
        program = self.program
        for t in program.captured:
            if t.device != device and t.requires_grad:
                raise RegardError(
                    f"{self!r} uses a tensor on another device",
                    got=f"{t.device}, while q is on {device}",
                    do=f"move it first: .to({str(device)!r})",
                )
        program = program.on(device)
        b, h, _, _ = program.used
        return BoundPairwise(
            program.code,
            program.captured,
            torch.arange(shape.B if b else 1, device=device),
            torch.arange(shape.H if h else 1, device=device),
        )

    @cached_property
    def program(self) -> Program:
        return read(self.function, "pairwise")


@dataclass(frozen=True, eq=False, repr=False)
class BoundPairwise(Bias):
    """What a program adds to pairs, computed when needed, for some batch entries and heads: for one
    where it does not distinguish them."""

    code: Code
    captured: tuple[Tensor, ...]
    entries: Tensor
    own_heads: Tensor

    def of(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """What is added to pairs; places broadcast."""
        b = self.entries[b if len(self.entries) > 1 else torch.zeros_like(b)]
        h = self.own_heads[h if len(self.own_heads) > 1 else torch.zeros_like(h)]
        return self.code(self.captured, (b, h, q, k))

    def at(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h q k"]:
        return self._at(self.captured, q, k)

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor, into: list[Tensor]) -> None:
        def added(*learned: Tensor) -> Tensor:
            return self._learned_at(learned, q, k).to(d.dtype).expand_as(d)

        # Inside an operator autograd does not record, but transforms of functions do.
        back = torch.func.vjp(added, *_floats(self.captured))[1]
        for total, part in zip(into, back(d), strict=True):
            total += part

    def push_forward(self, q: Tensor, k: Tensor, moved: Bias) -> Float[Tensor, "b h q k"]:
        assert isinstance(moved, BoundPairwise)
        value, back, *_ = torch.func.vjp(
            lambda *learned: self._learned_at(learned, q, k), *_floats(self.captured)
        )
        # What goes back is linear in what comes, and its own gradient is the tangent. (Forward mode
        # within forward mode is more than PyTorch can do.)
        onward = torch.func.vjp(back, torch.zeros_like(value))[1]
        tangent: Tensor = onward(_floats(moved.captured))[0]
        return tangent

    def select(self, batch: Pick, heads: Pick) -> Bias:
        entries = self.entries if len(self.entries) == 1 else self.entries[batch]
        own = self.own_heads if len(self.own_heads) == 1 else self.own_heads[heads]
        return BoundPairwise(self.code, self.captured, entries, own)

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        return [() for t in self.captured if t.is_floating_point()]

    def _learned_at(self, learned: tuple[Tensor, ...], q: Tensor, k: Tensor) -> Tensor:
        again = iter(learned)
        captured = tuple(next(again) if t.is_floating_point() else t for t in self.captured)
        return self._at(captured, q, k)

    def _at(self, captured: tuple[Tensor, ...], q: Tensor, k: Tensor) -> Float[Tensor, "b h q k"]:
        b, h = self.entries.view(-1, 1, 1, 1), self.own_heads.view(-1, 1, 1)
        found = self.code(captured, (b, h, q[:, None], k))
        found = found if found.is_floating_point() else found.to(torch.float32)
        return found.expand(len(b), len(h), len(q), len(k))

    def __repr__(self) -> str:
        return f"pairwise({self.code!r})"


def _floats(captured: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.detach() for t in captured if t.is_floating_point())


@reading
def pairwise(function: Callable[..., Any]) -> Bias:
    """What a function adds to the logit of each pair: f(b, h, q, k) of batch entry, head, query and
    key.

    The part of FlexAttention's score_mod that is added, `score + f(b, h, q, k)`: each argument is a
    number, as a tensor without axes, and so is the answer. Queries and keys are counted from 0. The
    function is read once: numbers that it captures are taken as they are then; tensors stay shared,
    and may be learned.

    >>> import regard, torch
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> near = pairwise(lambda b, h, q, k: -((q - k) ** 2))
    >>> regard.trace(x, x, x, bias=near).weights(queries=[1])
    tensor([[[[0.2119, 0.5761, 0.2119]]]])
    """
    if not callable(function) or isinstance(function, (Tensor, Bias)):
        raise RegardError(
            "pairwise takes a function",
            got=type(function).__name__,
            accepted="f(b, h, q, k) that gives what is added to the logit of a pair",
            do="wrap a tensor in biases.dense(t)",
        )
    bias = Pairwise(function)
    if bias.program.result == torch.bool or bias.program.result.is_complex:
        raise RegardError(
            "pairwise: the function gives a number to add",
            got=f"{bias.program.result} from {bias!r}",
            accepted="a tensor without axes, of numbers",
            do="use masks.where(f) for what may be seen",
        )
    return bias
