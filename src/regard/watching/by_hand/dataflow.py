"""Tensors on their way through attention by hand, followed by what is done to them.

Nothing is kept alive by being followed: what is known of a tensor goes when the tensor goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from regard.watching.by_hand.axes import Atom, Axes, Axis, atoms, reshaped
from regard.watching.by_hand.calls import Call, call_of
from regard.watching.by_hand.changes import (
    COPIES,
    RESHAPES,
    changed_scores,
    changed_weights,
    laid_out,
    name_of,
)
from regard.watching.by_hand.products import Letters, Product, product
from regard.watching.by_hand.records import (
    Compared,
    Exponentials,
    Folded,
    Lost,
    LostError,
    Origin,
    Placed,
    Record,
    Scores,
    Total,
    Weights,
    version,
)
from regard.watching.by_hand.tensors import every, learned, plain

MIXED = (
    "a product mixes the weights between the softmax and the second product, as talking heads do"
)
SCALES = frozenset({"mul", "div", "add", "multiply", "divide", "true_divide"})
"""What may be done to queries once batch and heads are one axis."""
MIXES = frozenset({
    "add", "radd", "mul", "rmul", "multiply", "where", "maximum", "minimum", "cat", "concat",
    "concatenate", "stack", "lerp",
})  # fmt: skip
"""What may have scores in the place of any of its arguments."""
PARTS = frozenset({
    "getitem", "select", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unbind",
    "index_select", "gather", "take_along_dim", "topk",
})  # fmt: skip
"""What takes some of the numbers of a tensor."""
UNDIVIDED = "exponentials of its scores go into a product before they are divided by their sum"
FAR = 16
"""For so many steps it is remembered what happened to scores that could not be followed."""


class NoCall(NamedTuple):
    """A product that is not the end of an attention."""

    why: str = ""
    """What kept one from being followed, if that is what it is."""
    sure: bool = False
    """Whether it is one, also where it does not look like it."""
    origin: Origin | None = None
    """The softmax of weights that are multiplied, by what are no values."""


def keeps_apart(given: Tensor, out: Tensor) -> bool:
    """Whether a tensor that was reshaped, or copied, has its axes where they were: but for the
    last, of which several may have been made, or which was made of several."""
    before, after = given.shape, out.shape
    kept, cut = len(after) - 1, len(before) - 1
    if kept < 1:
        return True
    if before == after:
        same: bool = given.stride() == out.stride()
        return same
    return before[:kept] == after[:kept] or before[:cut] == after[:cut]


class Dataflow:
    """Which tensors are scores or weights of attention."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[weakref.ref[Tensor], Record, int]] = {}

    @property
    def followed(self) -> Collection[int]:
        """The tensors that are, by identity. It grows and shrinks as they do."""
        return self._records

    def clear(self) -> None:
        self._records.clear()

    def follows(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether one of the arguments of a call is followed."""
        known = self._records
        if not known:
            return False
        return any(id(given) in known for given in every(args, kwargs))

    def fold(self, given: Any, out: Any) -> None:
        """A tensor was reshaped, or copied into another order. Batch and heads may be one axis from
        now on, and how they lay in memory is not seen any more."""
        if not (isinstance(given, Tensor) and isinstance(out, Tensor) and plain(out)):
            return
        if keeps_apart(given, out):
            return
        steps = zip(given.shape, given.stride(), strict=True)
        own = tuple((Atom(n, step),) for n, step in steps)
        copied = out.shape == given.shape
        axes = own if copied else reshaped(own, out.shape)
        if axes is not None and (copied or any(len(axis) > 1 for axis in axes[:-1])):
            self.put(out, Folded(axes))

    def product(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor, path: str
    ) -> Call | NoCall:
        """Two tensors were multiplied: the attention that this completes, or what else it is."""
        given = product(func, args, kwargs)
        records = [self.of(t) for t in (given.tensors if given else every(args, kwargs))]
        weights = [(i, r) for i, r in enumerate(records) if isinstance(r, Weights)]
        if weights:
            at, record = weights[0]
            return self._weighted(given, at, record, out)
        lost = next((record for record in records if isinstance(record, Lost)), None)
        if lost and lost.origin and not lost.origin.seen:
            return NoCall(lost.why, lost.batched, lost.origin)
        undivided = next((r for r in records if isinstance(r, Exponentials)), None)
        if undivided:
            return NoCall(UNDIVIDED, sure=undivided.scores.compared.batched)
        if given is not None and all(map(plain, (*given.tensors, out))):
            before = lost.why if lost and not lost.part else ""
            if any(_mixes(r, w, given) for r, w in zip(records, given.letters, strict=True)):
                before = "a product mixes the scores before the softmax, as talking heads do"
            self._compare(given, out, path, before)
        return NoCall()

    def _compare(self, given: Product, out: Tensor, path: str, before: str) -> None:
        a, b = given.tensors
        # A projection: queries may be learned, what they are compared with is not.
        if (learned(b) and learned(a)) or (learned(b) and b.ndim <= 2):
            return
        known: dict[Any, Atom] = {}
        axes_a, axes_b = (given.axes_of(t, w, known) for t, w in given.sides())
        self._unfold(given, known)
        axes = tuple((known[x],) if x in known else () for x in given.out)
        own = tuple(
            tuple(known[x] for x in mine if x not in other and x in known and x in given.out)
            for mine, other in (given.letters, given.letters[::-1])
        )
        summed = [x for x in given.letters[0] if x in given.letters[1] and x not in given.out]
        alone = {*given.letters[0], *given.letters[1]} - {*given.out, *summed}
        if not summed or alone:
            return
        sides = (Placed.of(a, axes_a), Placed.of(b, axes_b))
        compared = Compared(sides, (own[0], own[1]), tuple(known[x] for x in summed), path, before)
        scores = Scores(compared, axes).times(given.factor)
        if given.added is not None:
            scores = scores.plus(given.added, given.share, out)
        self.put(out, scores)

    def _unfold(self, given: Product, known: dict[Any, Atom]) -> None:
        """Where batch and heads are one axis, what they were before. One that comes after another
        that both sides have is of heads alone, such as those that share keys."""
        shared = [x for x in given.out if all(x in letters for letters in given.letters)]
        for tensor, letters in given.sides():
            record = self.of(tensor)
            if isinstance(record, Folded):
                for x, axis in zip(letters, record.axes, strict=True):
                    parts, heads = atoms(axis), x in shared[1:]
                    cut = x not in known or known[x].parts
                    if x in given.out and len(parts) > 1 and not heads and not cut:
                        known[x].parts = tuple(Atom(part.size, part.step) for part in parts)
                    elif len(parts) == 1 and not cut and known[x].size == parts[0].size:
                        known[x].step = known[x].step or parts[0].step

    def _weighted(
        self, given: Product | None, at: int, weights: Weights, out: Tensor
    ) -> Call | NoCall:
        if weights.origin.seen:
            return NoCall(origin=weights.origin)
        if given is None:
            why = "its weights go into a product that is not one of two tensors"
            return NoCall(why, sure=weights.scores.compared.batched)
        tensor, values = given.tensors[at], given.tensors[1 - at]
        mine, other = given.letters[at], given.letters[1 - at]
        known = dict(zip(mine, weights.axes, strict=True))
        shared = {
            x: n for x, n in zip(other, values.shape, strict=True) if n != 1 or _one(known, x)
        }
        summed = {a for x in mine if x in other and x not in given.out for a in atoms(known[x])}
        keys, queries = set(weights.key_atoms), set(weights.query_atoms)
        if summed & queries:
            why = "the product is over another axis than the softmax"
            return NoCall(why, sure=weights.scores.compared.batched)
        if summed != keys or (learned(values) and values.ndim == 2 < tensor.ndim):
            self.put(out, Lost(MIXED, 0, weights.origin, weights.scores.compared.batched))
            return NoCall(origin=weights.origin)
        beside = {a for x in mine if x in shared and x in given.out for a in atoms(known[x])}
        if beside & queries or any(x not in given.out for x in mine if x not in other):
            # Each row has values of its own.
            return NoCall(origin=weights.origin)
        return call_of(weights, given, at, known)

    def softmax(self, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> None:
        own = args[0] if args else kwargs.get("input")
        scores = self.of(own)
        along = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(scores, Lost) and scores.origin is None:
            self.put(out, replace(scores, origin=Origin()))
        if isinstance(scores, Scores) and isinstance(along, int):
            self._weigh(scores, scores.axes, scores.axes[along], out)

    def _weigh(self, scores: Scores, axes: Axes, along: Axis, out: Tensor) -> None:
        try:
            weights = scores.weighed(axes, along)
        except LostError as error:
            self.put(out, Lost(str(error), 0, Origin(), scores.compared.batched))
            return
        sides = scores.compared.sides
        keys, queries = sides[weights.keys], sides[1 - weights.keys]
        # One matrix for all sequences is that of a classifier or router.
        if not learned(keys.tensor) and not keys.tensor.ndim == 2 < queries.tensor.ndim:
            self.put(out, weights)

    def change(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Something else was done with a tensor that is followed."""
        name, in_place = name_of(func)
        if name in PARTS:
            self._take(name, args, kwargs, out)
        result = args[0] if name == "setitem" else out
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        own, record = self._main(name, args, kwargs, result if in_place else None)
        if (
            isinstance(record, Exponentials)
            and not in_place
            and self._sum(record, name, args, kwargs, result)
        ):
            return
        if record is None or (result is own and not in_place) or not plain(result):
            return
        if result.numel() < own.numel():
            return
        self.put(result, _changed(record, own, func, name, args, kwargs, result))

    def _take(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Some scores or weights were taken: where these are what goes on, it is not left out
        without a word."""
        own: Any = args[0] if args else kwargs.get("input")
        lost = _part(self.of(own), name)
        for part in every([out], {}) if lost else ():
            if isinstance(part, Tensor) and plain(part) and part.numel() < own.numel():
                self.put(part, lost)

    def _sum(
        self, record: Exponentials, name: str, args: Sequence[Any], kwargs: Any, out: Tensor
    ) -> bool:
        """Whether exponentials were added up, or divided by their sum: then that is noted."""
        along = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("other"))
        if name == "sum":
            axis = along[0] if isinstance(along, (list, tuple)) and len(along) == 1 else along
            if isinstance(axis, int):
                self.put(out, Total(record.scores, record.axes[axis]))
            return True
        total = self.of(along) if name in ("div", "divide", "true_divide") else None
        if isinstance(total, Total) and total.scores is record.scores:
            self._weigh(record.scores, record.axes, total.along, out)
            return True
        return False

    def _main(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], written: Tensor | None
    ) -> tuple[Tensor, Record] | tuple[Any, None]:
        """Whose numbers go on: those of the first argument; or, of what is added, multiplied or
        put together, those of scores rather than of something else that is followed."""
        given = list(every(args, kwargs))
        first = args[0] if args else None
        several = name in MIXES and first is not written
        found = []
        for tensor in given if several or not args else given[:1]:
            record = self.of(tensor, written)
            if record is not None:
                found.append((tensor, record))
        if not found:
            return None, None
        return max(found, key=lambda pair: (_rank(pair[1]), pair[0].numel()))

    def of(self, tensor: Any, written: Tensor | None = None) -> Record | None:
        """What is known of a tensor, if it is still what it was. One that was just written to is
        another by now."""
        held = self._records.get(id(tensor))
        if held is None or not isinstance(tensor, Tensor) or held[0]() is not tensor:
            return None
        if isinstance(held[1], Folded):
            return held[1]
        if tensor is not written and held[2] != version(tensor):
            return Lost("scores or weights are written to where it could not be followed")
        return held[1]

    def put(self, tensor: Tensor, record: Record | None) -> None:
        key, known = id(tensor), self._records
        if record is None:
            known.pop(key, None)
            return
        known[key] = (
            weakref.ref(tensor, lambda _: known.pop(key, None)),
            record,
            version(tensor),
        )


def _part(record: Record | None, name: str) -> Lost | None:
    if isinstance(record, Lost):
        return None if record.steps == FAR else replace(record, steps=record.steps + 1)
    if isinstance(record, Weights):
        why = f"{name} takes some of the weights between the softmax and the second product"
        return Lost(why, 0, record.origin, record.scores.compared.batched, part=True)
    if isinstance(record, Scores):
        compared = record.compared
        if not compared.outer and not any(learned(side.tensor) for side in compared.sides):
            why = f"{name} takes some of the scores before the softmax"
            return Lost(why, batched=compared.batched, part=True)
    return None


def _changed(
    record: Record, own: Tensor, func: Any, name: str, args: Any, kwargs: Any, out: Tensor
) -> Record | None:
    if isinstance(record, Lost):
        far = record.steps == FAR
        return None if far else replace(record, steps=record.steps + 1)
    if isinstance(record, Total):
        return record if name in RESHAPES | COPIES | {"getitem"} else None
    try:
        axes = laid_out(record.axes, func, name, args, kwargs, out)
        if axes is not None:
            return replace(record, axes=axes)
        if isinstance(record, Scores) and name == "exp":
            return Exponentials(record, record.axes)
        if isinstance(record, Scores) and name == "log_softmax":
            why = "its softmax is the exponential of a log_softmax"
            return Lost(why, 0, Origin(), record.compared.batched)
        if isinstance(record, Folded):
            scaled = name in SCALES and out.shape == own.shape
            return record if scaled else None
        if isinstance(record, Exponentials):
            return None
        if isinstance(record, Scores):
            return changed_scores(record, own, name, args, kwargs, out)
        return changed_weights(record, own, name, args, kwargs, out)
    except LostError as error:
        if isinstance(record, Weights):
            return Lost(str(error), 0, record.origin, record.scores.compared.batched)
        if isinstance(record, Scores) and record.compared.outer:
            return None
        return Lost(str(error), batched=isinstance(record, Scores) and record.compared.batched)


def _mixes(record: Record | None, letters: Letters, given: Product) -> bool:
    """Whether a product sums over what queries and keys share: scores of several heads."""
    if not isinstance(record, Scores):
        return False
    own = {atom for side in record.compared.own for atom in atoms(side)}
    both = set(given.letters[0]) & set(given.letters[1]) - set(given.out)
    summed = {
        atom
        for x, axis in zip(letters, record.axes, strict=True)
        if x in both
        for atom in atoms(axis)
    }
    return bool(summed - own)


def _one(known: dict[Any, Axis], x: Any) -> bool:
    """Whether an axis of the weights is of length 1 as well."""
    return x in known and all(atom.size == 1 for atom in atoms(known[x]))


def _rank(record: Record) -> int:
    """What is more likely the product of queries and keys, where several are added: scores whose
    last two axes are of one side each."""
    if not isinstance(record, Scores):
        return 0 if isinstance(record, Folded) else 1
    sides = [set(atoms(side)) for side in record.compared.own]
    last = [set(atoms(axis)) for axis in record.axes[-2:]]
    return 2 + (len(last) == 2 and all(any(s & a for a in last) for s in sides))
