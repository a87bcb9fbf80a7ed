"""What looks like attention written out by hand: noticed, so that what cannot be followed is not
left out without a word.

It can be told from other arithmetic by shapes: a product of queries with keys, a softmax along the
keys, a product of the weights with values. Each of the three has to fit the one before. What is
compared must come from the input: a product with a parameter is the classifier, router or codebook
of a model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from regard.watching.by_hand.products import ADDED

RECENT = 8
"""How many products and softmaxes are remembered: between those of one attention are few others."""

SOFTMAXES = frozenset({
    torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax,
})  # fmt: skip


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


class LookAlikes:
    """The products and softmaxes of a run, the last few.

    `constants` says where parameters and buffers are held.
    """

    def __init__(self, constants: Callable[[], set[int]]) -> None:
        self._constants = constants
        self._scores: deque[_Scores] = deque(maxlen=RECENT)
        self._weights: deque[_Scores] = deque(maxlen=RECENT)

    def clear(self) -> None:
        self._scores.clear()
        self._weights.clear()

    def step(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, path: str
    ) -> str | None:
        """A product or a softmax in the module of that path. If it seems to complete an attention,
        the path of the module where that began."""
        if func in SOFTMAXES:
            self._softmax(args, kwargs, out)
            return None
        operands = _operands(func, args, kwargs)
        return None if operands is None else self._product(*operands, out, path)

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

    def _product(self, a: _Operand, b: _Operand, out: Tensor, path: str) -> str | None:
        for weights in reversed(self._weights):
            if (a.weighs(b, weights) or b.weighs(a, weights)) and not (
                self._constants().intersection(weights.held)
            ):
                return weights.path
        if a.free and b.free > 1 and not (a.learned_by(b) or b.learned_by(a)):
            both = (held(a.tensor), held(b.tensor))
            self._scores.append(_Scores(a.free, b.free, out.numel(), both, path))
        return None


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
    pair = tensors[1:3] if func in ADDED else tensors[:2]
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


def constants(model: nn.Module) -> set[int]:
    """Where the parameters and buffers of a model are held."""
    return {held(t) for t in (*model.parameters(), *model.buffers())} - {0}


def held(t: Tensor) -> int:
    """Where a tensor and its views are; 0 for those that stand for others."""
    return t.untyped_storage().data_ptr() if torch._C._has_storage(t) else 0
