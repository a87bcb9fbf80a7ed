"""What is known of a tensor on its way from queries and keys to a softmax, and on to the values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.watching.by_hand.axes import Atom, Axes, Axis, all_atoms, atoms, broadcast

MANY = 6
"""Biases, masks and factors that one attention may have: more are no attention's, and would be held
in memory."""
LOW = -1e3
"""A score that is put in the place of others hides them if it is this low, or lower."""


class LostError(Exception):
    """Something is done that a trace cannot say; the text says what."""


class Placed(NamedTuple):
    """A tensor, what its axes stand for, and how often it had been written to."""

    tensor: Tensor
    axes: Axes
    version: int
    by: float = 1.0

    @staticmethod
    def of(tensor: Tensor, axes: Axes, by: float = 1.0) -> Placed:
        return Placed(tensor, axes, version(tensor), by)

    def checked(self) -> Placed:
        if version(self.tensor) != self.version:
            raise LostError("a tensor it is made of is changed in place before the second product")
        return self


def version(tensor: Tensor) -> int:
    """How often a tensor was written to, where that is counted."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class Folded:
    """A tensor that a reshape gave one axis for several, such as batch and heads: maybe queries."""

    axes: Axes


class Compared(NamedTuple):
    """The two tensors whose product the scores are. Which are queries the softmax will tell."""

    sides: tuple[Placed, Placed]
    own: tuple[tuple[Atom, ...], tuple[Atom, ...]]
    """The axes that only one of them has."""
    summed: tuple[Atom, ...]
    path: str
    """The module that was running."""
    before: str = ""
    """What had been done to scores that this is the product of."""

    @property
    def batched(self) -> bool:
        return all(side.tensor.ndim > 2 for side in self.sides)

    @property
    def outer(self) -> bool:
        """Whether it sums over one number: more likely positions times the frequencies of rotary
        embeddings, which go into queries, than queries times keys."""
        return all(atom.size == 1 for atom in atoms(self.summed))


@dataclass(frozen=True)
class Scores:
    """A product that was scaled, biased and masked: cap · tanh(factor · q·k) + biases, with or
    without a cap."""

    compared: Compared
    axes: Axes
    factor: float = 1.0
    cap: float | None = None
    factors: tuple[Placed, ...] = ()
    biases: tuple[Placed, ...] = ()
    hidden: tuple[Placed, ...] = ()
    """True for pairs that may not see each other."""

    def times(self, number: float) -> Scores:
        if self.hidden and number <= 0:
            raise LostError("masked scores are multiplied by a number that is not positive")
        biases = tuple(bias._replace(by=bias.by * number) for bias in self.biases)
        if self.cap is None:
            return replace(self, factor=self.factor * number, biases=biases)
        return replace(self, cap=self.cap * number, biases=biases)

    def times_tensor(self, tensor: Tensor, out: Tensor) -> Scores:
        if self.biases or self.hidden or self.cap is not None:
            raise LostError("scores are multiplied by a tensor after a mask, a bias or a soft-cap")
        axes = broadcast(self.axes, out.shape)
        return replace(self, axes=axes, factors=self._more(self.factors, tensor, axes))

    def plus(self, tensor: Tensor, by: float, out: Tensor) -> Scores:
        axes = broadcast(self.axes, out.shape)
        return replace(self, axes=axes, biases=self._more(self.biases, tensor, axes, by))

    def hide(self, mask: Tensor, out: Tensor) -> Scores:
        axes = broadcast(self.axes, out.shape)
        return replace(self, axes=axes, hidden=self._more(self.hidden, mask, axes))

    def capped(self) -> Scores:
        if self.biases or self.hidden or self.cap is not None:
            raise LostError("tanh comes after a mask or a bias")
        return replace(self, cap=1.0)

    def _more(
        self, given: tuple[Placed, ...], tensor: Tensor, axes: Axes, by: float = 1.0
    ) -> tuple[Placed, ...]:
        if len(given) == MANY:
            raise LostError(f"more than {MANY} tensors are added to the scores, or mask them")
        return (*given, Placed.of(tensor, axes, by))

    def weighed(self, axes: Axes, along: Axis) -> Weights:
        """The softmax along one axis. Which side holds the keys it tells: that which has the axis
        to itself."""
        if self.compared.before:
            raise LostError(self.compared.before)
        over = set(atoms(along))
        for side in (1, 0):
            keys = [atom for atom in self.compared.own[side] if over.issuperset(atoms([atom]))]
            if keys and set(atoms(keys)) == over:
                return Weights(self, axes, side, tuple(keys), self._queries(side, len(keys)))
        raise LostError(
            "the softmax is not over keys: it is over other axes than one of the two tensors that "
            "are compared has to itself"
        )

    def _queries(self, keys: int, axes: int) -> tuple[Atom, ...]:
        """The axes of queries: as many as keys have, the last ones that the other side has to
        itself. Those before are heads that share keys."""
        order = all_atoms(self.axes)
        own = sorted(self.compared.own[1 - keys], key=lambda atom: order.index(atoms([atom])[0]))
        return tuple(own[-axes:])


class Origin:
    """One softmax. All that is made of its weights has it in common."""

    def __init__(self) -> None:
        self.seen = False


@dataclass(frozen=True)
class Weights:
    """The softmax of scores, along the keys."""

    scores: Scores
    axes: Axes
    keys: int
    """Which of the two sides holds them."""
    key_axes: tuple[Atom, ...]
    query_axes: tuple[Atom, ...]
    origin: Origin = field(default_factory=Origin)
    dropped: bool = False

    @property
    def key_atoms(self) -> list[Atom]:
        return atoms(self.key_axes)

    @property
    def query_atoms(self) -> list[Atom]:
        return atoms(self.query_axes)

    @property
    def batch_atoms(self) -> list[Atom]:
        others = {*self.key_atoms, *self.query_atoms}
        return [atom for atom in all_atoms(self.axes) if atom not in others]


@dataclass(frozen=True)
class Exponentials:
    """exp of scores: a softmax that is itself written out."""

    scores: Scores
    axes: Axes


@dataclass(frozen=True)
class Total:
    """The sum of exponentials along one axis."""

    scores: Scores
    along: Axis


@dataclass(frozen=True)
class Lost:
    """What was scores or weights, until something was done that a trace cannot say."""

    why: str
    steps: int = 0
    """How many functions ago."""
    origin: Origin | None = None
    """The softmax, if it came before."""
    batched: bool = False
    """Whether it is scores of several sequences or heads: two matrices may be anything."""
    part: bool = False
    """Whether only some of them were taken. What is a part of any product may become queries."""


Record = Folded | Scores | Exponentials | Total | Weights | Lost


def hides(value: object) -> bool:
    """Whether pairs are hidden whose score is replaced by this."""
    if isinstance(value, Tensor):
        low = value <= LOW if value.is_floating_point() else torch.zeros(1, dtype=torch.bool)
        return value.numel() > 0 and bool(low.all())
    return isinstance(value, (int, float)) and not math.isnan(value) and value <= LOW
