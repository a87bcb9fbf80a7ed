"""Every query sees the first keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Int8
from torch import Tensor

from regard.device_copies import moved
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.spans import Spans, of_limits
from regard.masks.tiles import Tiles, states
from regard.values import Pick, Shape, broadcasts, readable, whole, whole_numbers


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """Keys before a limit: one for all, or one per batch entry."""

    limit: int | Tensor

    @property
    def batch(self) -> int:  # type: ignore[override]
        return len(self.limit) if isinstance(self.limit, Tensor) else 1

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        if not isinstance(self.limit, Tensor):
            return self
        if not broadcasts(len(self.limit), shape.B):
            raise RegardError(
                f"{self!r} is for another batch size",
                got=f"{len(self.limit)} lengths for a batch of {shape.B}",
                accepted=f"a tensor [{shape.B}] or [1]",
            )
        return type(self)(moved(self.limit, device))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        return k < self._limits(b)

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b 1 t"]:
        batch = torch.arange(self.batch, device=tiles.q0.device).view(-1, 1, 1)
        limit = self._limits(batch)
        return states(full=tiles.k1 <= limit, empty=tiles.k0 >= limit)

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        return of_limits(self.limit, shape, device)

    def select(self, batch: Pick, heads: Pick) -> Mask:
        return self if self.batch == 1 else type(self)(self.limit[batch])  # type: ignore[index]

    def _limits(self, b: Tensor) -> Tensor | int:
        if not isinstance(self.limit, Tensor):
            return self.limit
        return self.limit[b if self.batch > 1 else torch.zeros_like(b)]


def prefix(n: int | Sequence[int] | Int[Tensor, "b"]) -> Mask:
    """Every query sees the first `n` keys: with `causal() |`, a prefix language model.

    Where there are fewer keys, it sees all of them.

    >>> from regard.masks import causal
    >>> print((causal() | prefix(2)).draw(4))
    ████····
    ████····
    ██████··
    ████████
    """
    return Prefix(checked_limit("prefix", n))


def checked_limit(name: str, limit: int | Sequence[int] | Tensor) -> int | Tensor:
    """A limit that is a count, or a tensor of counts [B]."""
    if not isinstance(limit, (Tensor, Sequence)) and limit is not None:
        limit = whole(name, limit)
        if limit < 0:
            raise RegardError(f"{name} takes a count of keys", got=str(limit), accepted="0 or more")
        return limit
    limits = whole_numbers(
        limit,
        (1,),
        f"{name} takes one whole number per batch entry",
        "an integer tensor [B]",
        "for a mask of booleans use masks.keep(t) or masks.ignore(t)",
    )
    if readable(limits) and bool((limits < 0).any()):
        raise RegardError(
            f"{name} takes counts of keys", got=str(int(limits.min())), accepted="0 or more"
        )
    return limits
