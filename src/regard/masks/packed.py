"""Several sequences end to end, each under a mask of its own places.

Unlike `documents`, which only keeps neighbours apart, a packed mask counts places from the start of
each sequence, and queries and keys may be cut at different places.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.device_copies import moved
from regard.errors import RegardError
from regard.masks.algebra import And, Mask, Not, Or
from regard.masks.prefix import Prefix
from regard.masks.spans import Spans
from regard.masks.tiles import EMPTY, PARTIAL, Tiles
from regard.values import Pick, Shape, readable


class _Places(NamedTuple):
    """For each query or key: its sequence, and its place among the keys of that sequence."""

    sequence: Int[Tensor, "n"]
    place: Int[Tensor, "n"]


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """A mask for each of several sequences; None lets each see all of itself."""

    mask: Mask | None
    queries: Tensor
    keys: Tensor

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        bound = self._bound.get((shape, device))
        if bound is None:
            bound = self._bind(shape, device)
            if self._lasts:
                self._bound[shape, device] = bound
        return bound

    def _bind(self, shape: Shape, device: torch.device) -> Packed:
        queries, keys = (t.to(torch.int64) for t in (self.queries, self.keys))
        self._check(queries, keys, shape)
        same = torch.equal(queries, keys)
        longest = int(keys.max()) if len(keys) else 0
        inner = self.mask
        if inner is not None:
            before = 0
            if not same:
                _check_ends(inner, queries, keys)
                before = max(0, int((queries - keys).max()))
            # As many queries as keys: queries and keys have the same positions, which give the
            # alignment. Queries that stand before all keys are farther from them than those are
            # apart.
            reach = longest + before
            inner = inner.bind(Shape(len(keys), shape.H, reach, reach), device)
        # Backends cache what they derive from a mask, and check the version counters of its
        # tensors. Inference tensors have none.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            there = moved(queries, device)
            bound = Packed(inner, there, there if same else moved(keys, device))
        return _known(bound, (shape.Q, shape.K))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        mine, q_place = (t[q] for t in self._queries)
        theirs, k_place = (t[k] for t in self._keys)
        if self.mask is None:
            return mine == theirs
        return (mine == theirs) & self.mask.allows(mine, h, q_place, k_place)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "1 h t"]:
        first, last = self._queries.sequence[tiles.q0], self._queries.sequence[tiles.q1 - 1]
        k_first, k_last = self._keys.sequence[tiles.k0], self._keys.sequence[tiles.k1 - 1]
        apart = (last < k_first) | (k_last < first)
        one = (first == last) & (k_first == k_last) & (first == k_first)
        size = 1, self.heads, len(tiles.q0)
        state = torch.full(size, PARTIAL, dtype=torch.int8, device=one.device)
        state[..., apart] = EMPTY
        if self.mask is None:
            state[..., one] = 2
            return state
        whole = one.nonzero().squeeze(-1)
        q, k = self._queries.place, self._keys.place
        q0, q1, k0, k1 = (edge[whole] for edge in tiles)
        inside = Tiles(q[q0], q[q1 - 1] + 1, k[k0], k[k1 - 1] + 1)
        if len(whole):
            found = self.mask.judge(inside).expand(self.mask.batch, self.heads, -1)
            mine = first[whole] if self.mask.batch > 1 else torch.zeros_like(whole)
            state[0, :, whole] = found[mine, :, torch.arange(len(whole), device=mine.device)].T
        return state

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        mine, place = (t.to(device) for t in self._queries)
        lengths = self.keys.to(device)
        start = (lengths.cumsum(0) - lengths)[mine][None, None]
        longest = int(self.keys.max()) if len(self.keys) else 0
        if self.mask is None or not longest:
            return Spans(start, start + lengths[mine], lengths.new_ones((), dtype=torch.bool))
        inside = self.mask.spans(Shape(len(lengths), shape.H, longest, longest), device)
        if inside is None:
            return None
        whose = mine if self.mask.batch > 1 else torch.zeros_like(mine)
        first, stop = (edge[whose, :, place.clamp_min(0)].T[None] for edge in inside[:2])
        stop = torch.minimum(stop, lengths[mine])
        # Of more queries than keys, the first ones stand before all keys: nobody told their runs.
        sure = inside.sure & (place >= 0).all()
        return Spans(start + torch.minimum(first, stop), start + stop, sure)

    def select(self, batch: Pick, heads: Pick) -> Mask:
        if self.mask is None or self.heads == 1:
            return self
        inner = self.mask.select(slice(None), heads)
        return _known(Packed(inner, self.queries, self.keys), self._tokens)

    @property
    def heads(self) -> int:  # type: ignore[override]
        return 1 if self.mask is None else self.mask.heads

    @cached_property
    def _queries(self) -> _Places:
        # The last query of a sequence stands at its last key.
        return _places(self.queries, self.keys - self.queries, self._tokens[0])

    @cached_property
    def _keys(self) -> _Places:
        if self.queries is self.keys:
            return self._queries
        return _places(self.keys, torch.zeros_like(self.keys), self._tokens[1])

    @cached_property
    def _tokens(self) -> tuple[int, int]:
        """How many queries and keys there are."""
        return int(self.queries.sum()), int(self.keys.sum())

    @cached_property
    def _bound(self) -> dict[tuple[Shape, torch.device], Packed]:
        """What it was for calls before: layers share a mask, and what backends make of it."""
        return {}

    @property
    def _lasts(self) -> bool:
        """Whether what is bound now stays valid: nothing can write into it, and no transform wraps
        it."""
        inner = self.mask
        return readable(self.queries) and (
            inner is None or not (inner.tensors() or inner.is_local())
        )

    def _check(self, queries: Tensor, keys: Tensor, shape: Shape) -> None:
        fits = queries.shape == keys.shape and queries.ndim == 1 and shape.B == 1
        if fits and readable(queries) and readable(keys):
            sums = int(queries.sum()), int(keys.sum())
            fits = sums == (shape.Q, shape.K) and not bool(((queries < 0) | (keys < 0)).any())
        if not fits:
            raise RegardError(
                "packed: the sequences do not make up the call",
                got=f"{self!r} for {list(shape)}",
                accepted="lengths that add up to the queries and keys of one batch entry",
            )


def _known(mask: Packed, tokens: tuple[int, int]) -> Packed:
    """A mask whose lengths need not be added up: on a card that waits for the device."""
    vars(mask)["_tokens"] = tokens
    return mask


def _places(lengths: Tensor, first: Tensor, n: int) -> _Places:
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(
        lengths, output_size=n
    )
    start = lengths.cumsum(0) - lengths
    return _Places(sequence, torch.arange(n, device=lengths.device) - (start - first)[sequence])


def _check_ends(mask: Mask, queries: Tensor, keys: Tensor) -> None:
    """Between sequences of different lengths only what aligns to the end of each, or speaks of keys
    alone, means the same in all."""
    match mask:
        case And() | Or():
            _check_ends(mask.left, queries, keys)
            _check_ends(mask.right, queries, keys)
            return
        case Not():
            _check_ends(mask.mask, queries, keys)
            return
        case Prefix():
            return
    if mask.relative and getattr(mask, "offset", None) is None:
        return
    raise RegardError(
        f"{mask!r} does not say where the queries of each sequence stand among its keys",
        got=f"q {_some(queries)}, k {_some(keys)} long",
        accepted="causal(), window(w), dilated(step), prefix(n), padding(lengths) and what is "
        "combined of them; any mask between sequences of the same lengths",
        do="call regard.attention once for each sequence",
    )


def _some(lengths: Tensor) -> str:
    few = lengths[:8].tolist()
    return f"[{', '.join(map(str, few))}{', …' if len(lengths) > 8 else ''}]"
