"""What the axes of a tensor stand for, through transposes and reshapes.

Each axis is made of atoms: the query of an attention, its key, a batch, a head. Tensors of one
attention share them, so that a mask, a bias or values can be laid beside its queries and keys
whatever the order of their axes. A reshape that cuts an axis in two cuts its atom, and with it the
same atom in every other tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Atom:
    """A part of an axis that no reshape has cut yet."""

    __slots__ = ("parts", "size", "step")

    def __init__(self, size: int, step: int = 0) -> None:
        self.size = size
        self.step = step
        """How far its places were apart in memory before a copy was made, if one was; else 0."""
        self.parts: tuple[Atom, ...] = ()
        """What a reshape made of it."""


Axis = tuple[Atom, ...]
Axes = tuple[Axis, ...]


class UnplacedError(Exception):
    """A tensor whose axes are not those of an attention."""


def atoms(axis: Iterable[Atom]) -> list[Atom]:
    """Those of an axis, or of several axes one after the other, as they are cut by now."""
    found: list[Atom] = []
    for atom in axis:
        found += atoms(atom.parts) if atom.parts else [atom]
    return found


def all_atoms(axes: Iterable[Axis]) -> list[Atom]:
    return [atom for axis in axes for atom in atoms(axis)]


def moved(axes: Axes, move: Callable[[Tensor], Any]) -> Axes | None:
    """The axes after a transpose or permutation, told by what it does to a tensor without numbers
    whose axes differ in length."""
    marked = move(torch.empty(tuple(range(2, len(axes) + 2)), device="meta"))
    if not isinstance(marked, Tensor) or marked.ndim != len(axes):
        return None
    return tuple(axes[n - 2] for n in marked.shape)


def reshaped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes after a reshape; None if it cuts across them."""
    waiting = all_atoms(axes)[::-1]
    found: list[Axis] = []
    for size in shape:
        taken, have = [], 1
        if size == 1 and waiting and waiting[-1].size == 1:
            taken.append(waiting.pop())
        while have != size:
            if not waiting or not size or size % have:
                return None
            atom, need = waiting.pop(), size // have
            if need % atom.size:
                if atom.size % need:
                    return None
                rest = atom.size // need
                atom.parts = (Atom(need, atom.step * rest), Atom(rest, atom.step))
                waiting.append(atom.parts[1])
                atom = atom.parts[0]
            taken.append(atom)
            have *= atom.size
        found.append(tuple(taken))
    # What is left over are axes of length 1.
    if math.prod(atom.size for atom in waiting) != 1:
        return None
    return tuple(found)


def broadcast(axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes of what has that shape after something was added to a tensor: those that came with
    it are new."""
    given: list[Axis] = [()] * (len(shape) - len(axes)) + list(axes)
    return tuple(
        axis if math.prod(a.size for a in atoms(axis)) == n else (Atom(n),)
        for axis, n in zip(given, shape, strict=True)
    )


def arranged(tensor: Tensor, axes: Axes, groups: Sequence[Sequence[Atom]]) -> Tensor:
    """The tensor with one axis for each group of atoms. A group of which it has none is an axis of
    length 1."""
    if tensor.ndim < len(axes):
        axes = axes[len(axes) - tensor.ndim :]
    mine: list[Atom] = []
    for n, axis in zip(tensor.shape, axes, strict=True):
        here = atoms(axis)
        whole = math.prod(atom.size for atom in here)
        if n not in (1, whole):
            raise UnplacedError
        mine += here if n == whole else []
    wanted = [atoms(group) for group in groups]
    order = [atom for group in wanted for atom in group if atom in mine]
    if len(order) != len(mine):
        raise UnplacedError
    out = tensor.reshape([atom.size for atom in mine]).permute([mine.index(a) for a in order])
    lengths = []
    for group in wanted:
        have = [atom for atom in group if atom in mine]
        lengths.append(math.prod(atom.size for atom in group) if have else 1)
        if have and len(have) < len(group):
            out = _filled(out, order, group)
            order = [*order[: order.index(have[0])], *group, *order[order.index(have[-1]) + 1 :]]
    return out.reshape(lengths)


def _filled(tensor: Tensor, order: list[Atom], group: list[Atom]) -> Tensor:
    """With all atoms of a group, of which it has some: the others are repeated, not copied."""
    start = next(i for i, atom in enumerate(order) if atom in group)
    for i, atom in enumerate(group):
        if atom not in order:
            tensor = tensor.unsqueeze(start + i)
            sizes = list(tensor.shape)
            sizes[start + i] = atom.size
            tensor = tensor.expand(sizes)
    return tensor


def laid_back(tensor: Tensor, groups: Sequence[Sequence[Atom]], axes: Axes) -> Tensor:
    """The reverse of `arranged`: a tensor with an axis for each group, with other axes instead."""
    mine = [atom for group in groups for atom in atoms(group)]
    wanted = all_atoms(axes)
    apart = tensor.reshape([atom.size for atom in mine])
    out = apart.permute([mine.index(atom) for atom in wanted])
    return out.reshape([math.prod(atom.size for atom in atoms(axis)) for axis in axes])
