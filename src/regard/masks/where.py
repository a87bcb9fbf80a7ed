"""A mask made of a function.

A function is read once (`regard.pair_programs`) and taken apart at its `&`, `|` and `~`. A part
that depends on distance alone, on keys alone or on queries alone, or that compares the same
property of both, becomes the mask of regard that says so, in O(n). What is left is asked tile by
tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int8
from torch import Tensor, fx

from regard.errors import RegardError
from regard.masks.algebra import And, Mask, Not, Or
from regard.masks.causal import Causal
from regard.masks.documents import Documents
from regard.masks.keep import Keep
from regard.masks.linear_forms import is_of_distance
from regard.masks.prefix import Prefix
from regard.masks.tiles import EMPTY, FULL, PARTIAL, Tiles, pairs_one_by_one
from regard.masks.window import Window
from regard.pair_programs import Code, Program, read, reading
from regard.values import Pick, Shape, runs_as_written

LOOKED_INTO = 1 << 16
"""Pairs of the largest tile that is looked into to judge it; larger ones are taken for partial."""

KEPT = 8
"""Kinds of calls for which a mask remembers what it comes to."""

COPIED = 1 << 26
"""Bytes that a function may capture on a CPU for what it comes to to be remembered."""

_aten = torch.ops.aten


class _Found(NamedTuple):
    """What a function came to, and the numbers on a CPU that it held then."""

    bound: Mask
    numbers: list[Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Where(Mask):
    """Pairs for which a function says True."""

    function: Callable[..., Any]

    @reading
    def bind(self, shape: Shape, device: torch.device) -> Mask:
        held = self.program.captured
        shared = [t for t in held if t.device.type == "cpu"]
        # What is made within a transform or a mode may be no more than a placeholder.
        lasts = runs_as_written() and not any(t.is_inference() for t in held)
        if not lasts or sum(t.nbytes for t in shared) > COPIED:
            return self._bound(shape, device)
        # The layers of a model share a mask, and what it comes to while nothing in it changes. Who
        # shares memory with a tensor of a CPU, as NumPy does, writes to it without being counted.
        # What is made in inference mode is not for calls that learn.
        inference = torch.is_inference_mode_enabled()
        key = shape, device, inference, *((t.data_ptr(), t._version) for t in held)
        known = self._found.get(key)
        if known is None or not all(map(torch.equal, known.numbers, shared)):
            if len(self._found) >= KEPT:
                self._found.clear()
            numbers = [t.clone() for t in shared]
            known = self._found[key] = _Found(self._bound(shape, device), numbers)
        return known.bound

    def _bound(self, shape: Shape, device: torch.device) -> Mask:
        program = self.program.on(device)
        if not shape.Q or not shape.K:
            return _asked(program, shape, device)
        (answer,) = (n.args[0] for n in program.code.graph.nodes if n.op == "output")
        assert isinstance(answer, fx.Node)
        return _taken_apart(program, answer, shape, device)

    @cached_property
    def program(self) -> Program:
        return read(self.function, "where")

    @cached_property
    def _found(self) -> dict[tuple[Any, ...], _Found]:
        return {}

    @property
    def device(self) -> torch.device:
        captured = self.program.captured
        return captured[0].device if captured else torch.device("cpu")


@dataclass(frozen=True, eq=False, repr=False)
class BoundWhere(Mask):
    """Pairs for which a program says True, asked when they are needed. `entries` and `own_heads`
    are the batch entries and heads it is asked about: one where it does not distinguish them."""

    code: Code
    captured: tuple[Tensor, ...]
    entries: Tensor
    own_heads: Tensor
    relative: bool

    @property
    def batch(self) -> int:  # type: ignore[override]
        return len(self.entries)

    @property
    def heads(self) -> int:  # type: ignore[override]
        return len(self.own_heads)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        b = self.entries[b if self.batch > 1 else torch.zeros_like(b)]
        h = self.own_heads[h if self.heads > 1 else torch.zeros_like(h)]
        found = self.code(self.captured, (b, h, q, k))
        # Axes that a program does not look at are still asked for.
        return found.expand(torch.broadcast_shapes(found.shape, q.shape, k.shape))

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        area = (tiles.q1 - tiles.q0) * (tiles.k1 - tiles.k0)
        state = torch.full(
            (self.batch, self.heads, len(area)), PARTIAL, dtype=torch.int8, device=area.device
        )
        small = (area <= LOOKED_INTO).nonzero().squeeze(-1)
        if len(small):
            inside = pairs_one_by_one(self, Tiles(*(edge[small] for edge in tiles)))
            found = torch.full_like(inside, PARTIAL, dtype=torch.int8)
            found[inside == area[small]] = FULL
            found[inside == 0] = EMPTY
            state[..., small] = found
        return state

    def select(self, batch: Pick, heads: Pick) -> Mask:
        return (
            BoundWhere(
                self.code,
                self.captured,
                self.entries if self.batch == 1 else self.entries[batch],
                self.own_heads if self.heads == 1 else self.own_heads[heads],
                self.relative,
            )
            if self.batch > 1 or self.heads > 1
            else self
        )

    def __repr__(self) -> str:
        return f"where({self.code!r})"


@reading
def where(function: Callable[..., Any]) -> Mask:
    """Pairs for which a function says True: f(b, h, q, k) of batch entry, head, query and key.

    As FlexAttention's mask_mod: each argument is a number, as a tensor without axes, and so is the
    answer, a boolean; True may be seen. Queries and keys are counted from 0. The function is read
    once: numbers that it captures are taken as they are then, tensors stay shared. Two such masks
    are equal if their function is the same object.

    >>> print(where(lambda b, h, q, k: (q >= k) & (q - k != 2)).draw(4))
    ██······
    ████····
    ··████··
    ██··████

    By itself (`draw`, `dense`, `count`) it is asked about batch entry 0 and head 0. No n×n tensor
    is built: what depends on distance, keys or queries alone, or compares a property of both, is
    found out in O(n), and anything else asked tile by tile.
    """
    if not callable(function) or isinstance(function, (Tensor, Mask)):
        raise RegardError(
            "where takes a function",
            got=type(function).__name__,
            accepted="f(b, h, q, k) that says True where a pair may be seen",
            do="wrap a boolean tensor in masks.keep(t) (True is attended to) or masks.ignore(t)",
        )
    mask = Where(function)
    if mask.program.result != torch.bool:
        raise RegardError(
            "where: the function says True or False",
            got=f"{mask.program.result} from {mask!r}",
            accepted="a boolean tensor without axes",
            do="compare with something, or use biases.pairwise(f) for numbers to add",
        )
    return mask


def _asked(program: Program, shape: Shape, device: torch.device) -> Mask:
    b, h, _, _ = program.used
    entries = torch.arange(shape.B if b else 1, device=device)
    heads = torch.arange(shape.H if h else 1, device=device)
    captured = tuple(t.detach() for t in program.captured)
    # Tables are not asked past their ends, as masks of distance may be.
    relative = is_of_distance(program) and not any(
        getattr(n.target, "overloadpacket", None) is _aten.index for n in program.code.graph.nodes
    )
    return BoundWhere(program.code, captured, entries, heads, relative)


def _taken_apart(program: Program, node: fx.Node, shape: Shape, device: torch.device) -> Mask:
    """The mask of the part of a program that ends at a node."""

    def inner(place: int) -> Mask:
        part = node.args[place]
        assert isinstance(part, fx.Node)
        return _taken_apart(program, part, shape, device)

    # Of whole numbers `&` is another number, and what is not 0 is True.
    parts = [part for part in node.args if isinstance(part, fx.Node)]
    told = all(program.part(part).result == torch.bool for part in parts)
    match getattr(node.target, "overloadpacket", None):
        case _aten.bitwise_and | _aten.logical_and if _of_two_nodes(node) and told:
            return And(inner(0), inner(1))
        case _aten.bitwise_or | _aten.logical_or if _of_two_nodes(node) and told:
            return Or(inner(0), inner(1))
        case _aten.bitwise_not | _aten.logical_not if told:
            return Not(inner(0))
        case _aten.eq if _of_two_nodes(node):
            found = _same_property(program, node, shape, device)
            if found is not None:
                return found
    return _known(program.part(node), shape, device)


def _of_two_nodes(node: fx.Node) -> bool:
    return len(node.args) == 2 and all(isinstance(n, fx.Node) for n in node.args)


def _known(part: Program, shape: Shape, device: torch.device) -> Mask:
    _, h, q, k = part.used
    axes = [
        torch.arange(n if used else 1, device=device)
        for n, used in zip(shape, part.used, strict=True)
    ]
    at = [t.view(-1, *(1,) * (3 - i)) for i, t in enumerate(axes)]
    if not (q and k):
        table = part(*at).expand([len(t) for t in axes])
        return _of_keys(table) if k and not h else Keep(table.contiguous())
    if is_of_distance(part):
        band = _band(part, shape, device)
        if band is not None:
            return band
    return _asked(part, shape, device)


def _of_keys(table: Bool[Tensor, "b 1 1 k"]) -> Mask:
    seen = table[:, 0, 0]
    limits = seen.sum(-1)
    first = torch.arange(seen.shape[-1], device=seen.device) < limits[:, None]
    return Prefix(limits) if torch.equal(first, seen) else Keep(table.contiguous())


def _band(part: Program, shape: Shape, device: torch.device) -> Mask | None:
    """The mask of a program of distance, if it allows one run of distances."""
    distance = torch.arange(-shape.Q + 1, shape.K, device=device)
    q = (-distance).clamp_min(0)
    zero = torch.zeros_like(q)
    allowed = part(zero, zero, q, q + distance).expand(len(distance))
    seen = distance[allowed]
    everything = Window(None, None, 0)
    if not len(seen):
        return Not(everything)
    low, high = int(seen[0]), int(seen[-1])
    if len(seen) != high - low + 1:
        return None
    if low > -shape.Q + 1:
        return Window(0, None if high == shape.K - 1 else high - low, low)
    return everything if high == shape.K - 1 else Causal(high)


def _same_property(
    program: Program, node: fx.Node, shape: Shape, device: torch.device
) -> Mask | None:
    """ids[q] == ids[k], as documents, where queries and keys have the same ids."""
    sides = [program.part(side) for side in node.args if isinstance(side, fx.Node)]
    sides.sort(key=lambda side: side.used[3])
    (b, h, q, k), (b2, h2, q2, k2) = (side.used for side in sides)
    if (q, k, q2, k2) != (True, False, False, True) or h or h2 or shape.Q != shape.K:
        return None
    if any(side.result.is_floating_point or side.result.is_complex for side in sides):
        return None
    n = shape.B if b or b2 else 1
    entries, place = torch.arange(n, device=device)[:, None], torch.arange(shape.K, device=device)
    zero = torch.zeros_like(entries)
    ids, keys = (side(entries, zero, place, place).expand(n, shape.K) for side in sides)
    # Ids are ordered by the outline of documents; booleans have none.
    return Documents(ids.long(), 0) if torch.equal(ids, keys) else None
