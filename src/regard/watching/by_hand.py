"""Attention written out by hand: noticed, so that it is not left out without a word.

It cannot be looked into, but it can be told from other arithmetic: a product of queries with keys,
a softmax along the keys, a product of the weights with values. Each of the three has to fit the one
before in its shape. What is compared must come from the input: a product with a parameter is the
classifier, router or codebook of a model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

RECENT = 8
"""How many products and softmaxes are remembered: between those of one attention are few others."""

_MATMULS = frozenset({
    torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm, Tensor.__matmul__,
    Tensor.__rmatmul__,
})  # fmt: skip
_ADDED = frozenset({torch.baddbmm, torch.addmm, Tensor.baddbmm, Tensor.addmm})
_SOFTMAXES = frozenset({
    torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax,
})  # fmt: skip
STEPS = _MATMULS | _ADDED | _SOFTMAXES | {torch.einsum}
"""The functions that attention by hand is made of."""


class _Scores(NamedTuple):
    queries: int
    keys: int
    numel: int
    held: tuple[int, int]
    """Where the two that were compared are held."""
    path: str

    @property
    def mirrored(self) -> _Scores:
        """With keys in rows and queries in columns."""
        return self._replace(queries=self.keys, keys=self.queries)


class HandWritten:
    """The paths of modules that attend by hand.

    `where` says which module is running, `constants` where parameters and buffers are held.
    """

    def __init__(self, where: Callable[[], str], constants: Callable[[], set[int]]) -> None:
        self.found: set[str] = set()
        self._where, self._constants = where, constants
        self._scores: deque[_Scores] = deque(maxlen=RECENT)
        self._weights: deque[_Scores] = deque(maxlen=RECENT)

    def begin(self) -> None:
        """Nothing of one run belongs to the next."""
        self._scores.clear()
        self._weights.clear()

    def step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One of STEPS was called."""
        if not isinstance(out, Tensor) or out.is_nested or out.layout != torch.strided:
            return
        if func in _SOFTMAXES:
            self._softmax(args, kwargs, out)
            return
        operands = _operands(func, args, kwargs)
        if operands is not None:
            self._product(*operands, out)

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        along = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(along, int) or not out.ndim:
            return
        keys = out.shape[along]
        for given in reversed(self._scores):
            for scores in (given, given.mirrored):
                # A sink may stand beside the keys.
                size = scores.numel // scores.keys * keys
                if keys - scores.keys in (0, 1) and out.numel() == size:
                    self._weights.append(scores)
                    return

    def _product(self, a: _Operand, b: _Operand, out: Tensor) -> None:
        for weights in reversed(self._weights):
            if (a.weighs(b, weights) or b.weighs(a, weights)) and not (
                self._constants().intersection(weights.held)
            ):
                self.found.add(_shared(weights.path, self._where()))
                return
        if a.free and b.free > 1 and not (a.learned_by(b) or b.learned_by(a)):
            held = (_held(a.tensor), _held(b.tensor))
            self._scores.append(_Scores(a.free, b.free, out.numel(), held, self._where()))


class _Operand(NamedTuple):
    """One of two tensors that are multiplied, and the sizes of its axes that the result has, and of
    those that are summed over. Axes of the batch are neither."""

    tensor: Tensor
    free: int
    summed: int

    def weighs(self, values: _Operand, scores: _Scores) -> bool:
        """Whether these are the weights of given scores, and rows of them share values."""
        return (
            self.tensor.numel() == scores.numel
            and self.summed == values.summed == scores.keys
            and (self.free > 1 or scores.queries == 1)
        )

    def learned_by(self, other: _Operand) -> bool:
        """Whether it is one matrix for all sequences of the other: it is not made of them."""
        return self.tensor.ndim == 2 < other.tensor.ndim


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Operand, _Operand] | None:
    """Two matrices, or stacks of them, that are multiplied."""
    if func is torch.einsum:
        return _einsum(args)
    tensors = [*args, *(kwargs[n] for n in _NAMES if n in kwargs)]
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    pair = tensors[1:3] if func in _ADDED else tensors[:2]
    if func is Tensor.__rmatmul__:
        pair.reverse()
    if len(pair) < 2 or min(t.ndim for t in pair) < 2:
        return None
    a, b = pair
    return _Operand(a, *a.shape[-2:]), _Operand(b, *reversed(b.shape[-2:]))


_NAMES = ("input", "self", "batch1", "mat1", "other", "mat2", "batch2")


def _einsum(args: tuple[Any, ...]) -> tuple[_Operand, _Operand] | None:
    if not args or not isinstance(args[0], str):
        return None
    given = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, _, output = args[0].replace(" ", "").replace("...", "").partition("->")
    letters = inputs.split(",")
    if not output or len(given) != 2 or len(letters) != 2:
        return None
    found = []
    for mine, others, tensor in zip(letters, reversed(letters), given, strict=True):
        # An ellipsis stands for the first axes.
        sizes = dict(zip(reversed(mine), reversed(tensor.shape), strict=False))
        free = [n for x, n in sizes.items() if x in output and x not in others]
        summed = [n for x, n in sizes.items() if x in others and x not in output]
        found.append(_Operand(tensor, math.prod(free) if free else 0, math.prod(summed)))
    return found[0], found[1]


def _shared(a: str, b: str) -> str:
    """The module that both paths are in."""
    parts = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        parts.append(x)
    return ".".join(parts)


def constants(model: nn.Module) -> set[int]:
    """Where the parameters and buffers of a model are held."""
    return {_held(t) for t in (*model.parameters(), *model.buffers())} - {0}


def _held(t: Tensor) -> int:
    """Where a tensor and its views are; 0 for those that stand for others."""
    return t.untyped_storage().data_ptr() if torch._C._has_storage(t) else 0
