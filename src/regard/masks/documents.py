"""Several documents packed into one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.device_copies import moved
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.spans import Spans, of_ids
from regard.masks.tiles import Tiles, states
from regard.values import Pick, Shape, broadcasts, end_aligned, whole, whole_numbers


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    ids: Tensor
    offset: int | None = None

    @property
    def batch(self) -> int:  # type: ignore[override]
        return len(self.ids) if self.ids.ndim == 2 else 1

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        offset = end_aligned(self.offset, shape)
        ids = self.ids if self.ids.ndim == 2 else self.ids[None]
        if not broadcasts(ids.shape[0], shape.B) or ids.shape[1] != shape.K:
            raise RegardError(
                "documents: one id per key is needed",
                got=f"ids {list(self.ids.shape)} for batch {shape.B} and {shape.K} keys",
                accepted=f"[{shape.K}] or [{shape.B}, {shape.K}]",
            )
        if offset < 0 or offset + shape.Q > shape.K:
            raise RegardError(
                "documents: every query must stand at a key to have a document",
                got=f"{shape.Q} queries from position {offset}, {shape.K} keys",
                accepted="queries that stand among the keys",
                do="for cross attention between packed sequences use masks.keep",
            )
        return Documents(moved(ids, device), offset)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        assert self.offset is not None
        b = b if self.batch > 1 else torch.zeros_like(b)
        return self.ids[b, q + self.offset] == self.ids[b, k]

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b 1 t"]:
        assert self.offset is not None
        q_least, q_most = self._extremes(tiles.q0 + self.offset, tiles.q1 + self.offset)
        k_least, k_most = self._extremes(tiles.k0, tiles.k1)
        one = (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
        apart = (q_most < k_least) | (k_most < q_least)
        return states(full=one[:, None], empty=apart[:, None])

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        assert self.offset is not None
        return of_ids(self.ids.to(device), self.offset, shape)

    def select(self, batch: Pick, heads: Pick) -> Mask:
        return self if self.batch == 1 else Documents(self.ids[batch], self.offset)

    @cached_property
    def _tables(self) -> list[tuple[Tensor, Tensor]]:
        """Least and greatest id of every run of 1, 2, 4, … positions."""
        least = most = self.ids
        tables = [(least, most)]
        step = 1
        while 2 * step <= self.ids.shape[1]:
            least = torch.minimum(least[:, :-step], least[:, step:])
            most = torch.maximum(most[:, :-step], most[:, step:])
            tables.append((least, most))
            step *= 2
        return tables

    def _extremes(self, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest id in [start, stop), from two runs that cover it."""
        least = torch.empty(len(self.ids), len(start), dtype=self.ids.dtype, device=start.device)
        most = torch.empty_like(least)
        # The exponent of a number is exact, its logarithm is rounded.
        levels = torch.frexp((stop - start).double()).exponent - 1
        for level in levels[levels >= 0].unique().tolist():
            low, high = self._tables[level]
            here = (levels == level).nonzero().squeeze(1)
            first, last = start[here], stop[here] - (1 << level)
            least[:, here] = torch.minimum(low[:, first], low[:, last])
            most[:, here] = torch.maximum(high[:, first], high[:, last])
        return least, most


def documents(ids: Int[Tensor, "*b k"] | Sequence[int], *, offset: int | None = None) -> Mask:
    """Each query sees the keys of its own document; `ids` says which document a key belongs to.

    >>> from regard.masks import causal
    >>> print((causal() & documents([0, 0, 0, 1, 1])).draw(5))
    ██········
    ████······
    ██████····
    ······██··
    ······████
    """
    tensor = whole_numbers(
        ids,
        (1, 2),
        "documents: ids are whole numbers, one per key",
        "an integer tensor [K] or [B, K]",
    )
    return Documents(tensor, None if offset is None else whole("documents: offset", offset))
