"""One attention by hand, whole: its queries, keys and values as regard takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import masks
from regard.biases.dense import Dense
from regard.calls import dispatch
from regard.traces import Trace
from regard.watching.by_hand.axes import (
    Atom,
    Axes,
    Axis,
    UnplacedError,
    all_atoms,
    arranged,
    atoms,
    laid_back,
)
from regard.watching.by_hand.products import Product
from regard.watching.by_hand.records import LostError, Placed, Scores, Weights

HIDES = -30.0
"""What is added to a score of 0, at most, to hide it."""

Groups = tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom], Sequence[Atom]]
"""Which atoms are batch, heads, queries and keys."""


class Call(NamedTuple):
    """Weights that are multiplied by values: what came of it is an attention's output."""

    weights: Weights
    tensor: Tensor
    """That holds the weights."""
    values: Placed
    width: Sequence[Atom]
    """The axes that only the values have."""
    out: Axes
    """Those of the output."""
    added: bool
    """Whether something else was added to the output at once."""

    @property
    def sizes(self) -> tuple[int, int]:
        """How many queries and keys there are."""
        _, _, queries, keys = self._groups()
        return _size(queries), _size(keys)

    def trace(self) -> Trace:
        """The trace of the call, in the graph of autograd where that is on."""
        try:
            return dispatch.trace(**self._inputs())
        except UnplacedError:
            raise LostError("its tensors cannot be aligned") from None

    def differs(self, trace: Trace) -> bool:
        """Whether the weights that the model computed are others than those of the trace: by some
        rows, where both are finite and nothing was dropped. Rows that a number such as -1e9 hides
        whole are not compared: in low precision it swallows what tells their keys apart."""
        if self.weights.dropped:
            return False
        tensor = self.tensor
        computed = arranged(tensor, self.weights.axes, self._groups()).detach().float()
        B, H, Q, K = trace.inputs.shape
        rows = sorted({0, Q // 2, Q - 1})
        with torch.no_grad():
            ours = trace.weights(queries=rows).float()
            theirs = computed.expand(B, H, Q, K)[:, :, rows]
            apart = (ours - theirs).abs().sum(-1) / 2
            lse = trace.rows.lse[:, :, rows].float()
        eps = max(torch.finfo(t.dtype).eps for t in (trace.inputs.q, tensor))
        # Scores that were rounded to half precision may be off by much; a mistake is off by more.
        most = 0.5 if eps > torch.finfo(torch.float32).eps else 0.02
        apart = apart.masked_fill(lse.abs() * eps > most, 0)
        return bool((apart > most).any())

    def changed(self, given: Tensor, out: Tensor) -> Tensor:
        """Another output [B, H, Q, E] in the place of the call's own, with its axes."""
        batch, heads, queries, _ = self._groups()
        return laid_back(given, (batch, heads, queries, self.width), self.out).to(out.dtype)

    @property
    def changeable(self) -> bool:
        return not (self.added or self.weights.dropped)

    def _groups(self) -> Groups:
        weights = self.weights
        batch, heads = _heads(weights)
        return batch, heads, weights.query_atoms, weights.key_atoms

    def _inputs(self) -> dict[str, Any]:
        scores, groups = self.weights.scores, self._groups()
        batch, heads, queries, keys = groups
        compared = scores.compared
        summed = compared.summed
        side_q, side_k = (
            compared.sides[i].checked() for i in (1 - self.weights.keys, self.weights.keys)
        )
        shared = _key_heads(heads, (side_k.axes, self.values.axes))
        q = arranged(side_q.tensor, side_q.axes, (batch, heads, queries, summed))
        k = arranged(side_k.tensor, side_k.axes, (batch, shared, keys, summed))
        v = arranged(self.values.tensor, self.values.axes, (batch, shared, keys, self.width))
        q, k, wiped = _multiplied(q, k, scores, groups)
        B, H = _size(batch), _size(heads)
        G = max(k.shape[1], v.shape[1])
        q, k, v = q.expand(B, H, -1, -1), k.expand(B, G, -1, -1), v.expand(B, G, -1, -1)
        kind = reduce(torch.promote_types, (t.dtype for t in (q, k, v)))
        q, k, v = (t.to(kind) for t in (q, k, v))
        hidden = [_laid(mask, groups) for mask in scores.hidden]
        bias = Dense(_sum(scores, groups, q)) if scores.biases else None
        if wiped:
            added = [] if bias is None else [bias.tensor <= HIDES]
            q, more = _without_wiped(q, reduce(torch.logical_or, wiped), [*hidden, *added])
            hidden.append(more)
        mask = masks.ignore(reduce(torch.logical_or, hidden)) if hidden else None
        cap = scores.cap
        scale = scores.factor if cap is None else scores.factor * cap
        usual = max(q.shape[-1], 1) ** -0.5
        scale = usual if math.isclose(scale, usual, rel_tol=1e-6) else scale
        return {
            "q": q, "k": k, "v": v, "mask": mask, "bias": bias, "scale": scale, "softcap": cap,
        }  # fmt: skip


def _heads(weights: Weights) -> tuple[list[Atom], list[Atom]]:
    """Which of the axes that queries and keys share are the batch, and which are heads."""
    every, keys = weights.batch_atoms, weights.scores.compared.sides[weights.keys]
    if len(every) == 1:
        queries = weights.scores.compared.sides[1 - weights.keys]
        return (
            ([], every) if _inside_tokens(queries, every[0], weights.query_atoms) else (every, [])
        )
    if len(every) == 2 and _come_first(every, weights):
        return every[1:], every[:1]
    # Several query heads may share a key head.
    alone = len(every) > 2 and not _has(keys.axes, every[-1]) and _has(keys.axes, every[-2])
    split = len(every) - (2 if alone else 1)
    return every[:split], every[split:]


def _has(axes: Axes, atom: Atom) -> bool:
    return any(atom in atoms(axis) for axis in axes)


def _inside_tokens(queries: Placed, shared: Atom, rows: Sequence[Atom]) -> bool:
    """Whether an axis lies inside of what each token holds: then it is no batch, but heads."""
    strides = dict(zip(map(tuple, map(atoms, queries.axes)), queries.tensor.stride(), strict=True))
    one, row = strides.get((shared,)), strides.get(tuple(rows))
    return one is not None and row is not None and one < row and len(rows) > 0


def _come_first(shared: Sequence[Atom], weights: Weights) -> bool:
    """Whether heads stand before the batch: what each token holds has the first of two axes inside,
    and closer together than the second."""
    queries = weights.scores.compared.sides[1 - weights.keys]
    places, rows = all_atoms(queries.axes), weights.query_atoms
    steps = {atom: atom.step for atom in places}
    if not any(steps.values()):
        apart = zip(queries.axes, queries.tensor.stride(), strict=True)
        steps = {atom: step for axis, step in apart for atom in atoms(axis)[-1:]}
    first, last, row = (steps.get(atom, 0) for atom in (*shared, *rows[:1]))
    return len(rows) == 1 and 0 < first < min(last, row)


def _key_heads(heads: Sequence[Atom], held: Sequence[Axes]) -> Sequence[Atom]:
    """The heads that keys and values have: less than the queries', if these share some."""
    every = list(heads)
    while every and not any(_has(axes, every[-1]) for axes in held):
        every.pop()
    return every


def _size(group: Sequence[Atom]) -> int:
    return torch.Size([atom.size for atom in group]).numel()


def _laid(placed: Placed, groups: Groups) -> Tensor:
    placed.checked()
    return arranged(placed.tensor, placed.axes, groups)


def _sum(scores: Scores, groups: Groups, q: Tensor) -> Tensor:
    """What is added to the scores, all together."""
    total: Tensor | None = None
    for bias in scores.biases:
        more = _laid(bias, groups)
        more = more if more.is_floating_point() else more.to(q.dtype)
        more = more if bias.by == 1 else more * bias.by
        total = more if total is None else total + more
    assert total is not None
    return total.to(q.device)


def _multiplied(
    q: Tensor, k: Tensor, scores: Scores, groups: Groups
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Queries, or keys, times what scores are multiplied by; and the pairs that this wipes out."""
    wiped = []
    for factor in scores.factors:
        by = _laid(factor, groups).to(q.device)
        if by.shape[3] == 1:
            q = q * by
        elif by.shape[2] == 1:
            k = k * by.transpose(2, 3)
        elif bool(((by == 0) | (by == 1)).all()):
            wiped.append(by == 0)
        else:
            raise LostError("scores are multiplied by another number for each pair")
    return q, k, wiped


def _without_wiped(q: Tensor, wiped: Tensor, hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Queries, and which pairs to mask, where some scores are wiped out. A score of 0 is seen like
    any other, unless what is added then, or a mask, hides it. That of a whole row is one of 0."""
    shown = ~reduce(torch.logical_or, hidden) if hidden else torch.ones_like(wiped)
    shown = shown.to(wiped.device)
    seen = (wiped & shown).any(-1, keepdim=True)
    if bool((seen & (shown & ~wiped).any(-1, keepdim=True)).any()):
        raise LostError("scores are multiplied by 0 where nothing hides them")
    return q.masked_fill(seen, 0.0), wiped & ~seen


def call_of(weights: Weights, given: Product, at: int, known: dict[Any, Axis]) -> Call:
    """The call whose weights are one side (`at`) of a product, and the values the other; with the
    axes that are known of its letters."""
    values, width, axes, own = given.tensors[1 - at], [], [], {}
    for x, n in zip(given.letters[1 - at], values.shape, strict=True):
        if x in known and n == torch.Size([a.size for a in atoms(known[x])]).numel():
            axes.append(known[x])
        elif n == 1:
            axes.append(())
        else:
            width.append(Atom(n))
            own[x] = (width[-1],)
            axes.append(own[x])
    out = tuple(own.get(x, known.get(x, ())) for x in given.out)
    placed = Placed.of(values, tuple(axes))
    return Call(weights, given.tensors[at], placed, width, out, given.added is not None)
