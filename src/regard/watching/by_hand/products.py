"""Products of two tensors, by whatever function: which of their axes are summed over, which they
share, and which are one's own."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.watching.by_hand.axes import Atom, Axes, Axis

MATMULS = frozenset({
    torch.matmul, torch.bmm, torch.mm, torch.mv, torch.linalg.matmul, Tensor.matmul, Tensor.bmm,
    Tensor.mm, Tensor.mv, Tensor.__matmul__, Tensor.__rmatmul__,
})  # fmt: skip
ADDED = frozenset({torch.baddbmm, torch.addmm, Tensor.baddbmm, Tensor.addmm})
PRODUCTS = MATMULS | ADDED | {torch.einsum}

_FIRST = ("input", "self", "mat1", "batch1")
_SECOND = ("other", "mat2", "batch2", "vec")
Letters = tuple[Hashable, ...]


class Product(NamedTuple):
    """Two tensors that are multiplied, with a letter for each of their axes, as in einsum."""

    tensors: tuple[Tensor, Tensor]
    letters: tuple[Letters, Letters]
    out: Letters
    factor: float = 1.0
    added: Tensor | None = None
    """What is added to it, times `share`."""
    share: float = 1.0

    def sides(self) -> Iterator[tuple[Tensor, Letters]]:
        return zip(self.tensors, self.letters, strict=True)

    def axes_of(self, tensor: Tensor, letters: Letters, known: dict[Hashable, Atom]) -> Axes:
        """The axes of one of the two. Where it has 1 and the other more, it is the same for all of
        those."""
        axes: list[Axis] = []
        for x, n in zip(letters, tensor.shape, strict=True):
            lengths = [t.shape[word.index(x)] for t, word in self.sides() if x in word]
            axes.append((known.setdefault(x, Atom(n)),) if n == max(lengths) else ())
        return tuple(axes)


def product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    """What a call of one of PRODUCTS multiplies; None for what is no product of two."""
    if func is torch.einsum:
        return _einsum(args)
    if func in ADDED:
        return _added(args, kwargs)
    a = args[0] if args else _named(kwargs, _FIRST)
    b = args[1] if len(args) > 1 else _named(kwargs, _SECOND)
    if func is Tensor.__rmatmul__:
        a, b = b, a
    return _matmul(a, b)


def _named(kwargs: dict[str, Any], names: Sequence[str]) -> Any:
    return next((kwargs[name] for name in names if name in kwargs), None)


def _matmul(a: Any, b: Any) -> Product | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not (a.ndim and b.ndim):
        return None
    batch = max(a.ndim, b.ndim) - 2
    before = tuple(range(batch, 0, -1))
    mine = (*before[batch - (a.ndim - 2) :], "row", "sum") if a.ndim > 1 else ("sum",)
    other = (*before[batch - (b.ndim - 2) :], "sum", "column") if b.ndim > 1 else ("sum",)
    own: Letters = (*(("row",) if a.ndim > 1 else ()), *(("column",) if b.ndim > 1 else ()))
    return Product((a, b), (mine, other), (*before, *own))


def _added(args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    given = list(args[:3])
    names = (("input", "self"), ("batch1", "mat1"), ("batch2", "mat2"))
    given += [_named(kwargs, which) for which in names[len(given) :]]
    found = _matmul(given[1], given[2])
    share, factor = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if found is None or len(args) > 3 or not isinstance(given[0], Tensor):
        return None
    added = given[0] if share else None
    return found._replace(factor=float(factor), added=added, share=float(share))


def _einsum(args: Sequence[Any]) -> Product | None:
    if not args or not isinstance(args[0], str):
        return None
    given = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    said = inputs.split(",")
    if len(said) != 2 or len(given) != 2 or not all(isinstance(t, Tensor) for t in given):
        return None
    if not arrow:
        plain = inputs.replace(",", "").replace("...", "")
        once = sorted(x for x in set(plain) if plain.count(x) == 1)
        output = ("..." if "..." in inputs else "") + "".join(once)
    rests = [t.ndim - len(s.replace("...", "")) for s, t in zip(said, given, strict=True)]
    a, b = (_spelled(s, n) for s, n in zip(said, rests, strict=True))
    out = _spelled(output, max(rests) if "..." in output else 0)
    if any(len(set(word)) < len(word) for word in (a, b, out)):
        return None
    return Product((given[0], given[1]), (a, b), out)


def _spelled(word: str, rest: int) -> Letters:
    """A letter for each axis: an ellipsis stands for so many."""
    before, dots, after = word.partition("...")
    return (*before, *(range(rest, 0, -1) if dots else ()), *after)
