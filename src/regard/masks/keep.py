"""Any mask at all, as a tensor of booleans whose polarity is named."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from regard.device_copies import moved
from regard.errors import RegardError
from regard.masks.algebra import Mask, Not
from regard.masks.spans import Spans, of_table
from regard.masks.tiles import AreaTable, Tiles
from regard.values import Axes, Pick, Shape, broadcasts


@dataclass(frozen=True, eq=False, repr=False)
class Keep(Mask):
    table: Tensor

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.table.shape[0] if self.table.ndim == 4 else 1

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self.table.shape[1] if self.table.ndim == 4 else 1

    def on(self, axes: Axes) -> Mask:
        return Keep(axes.fold(self.table, "mask"))

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        table = self.table if self.table.ndim == 4 else _with_four_axes(self.table, shape)
        fits = zip(table.shape, shape, strict=True)
        if not all(broadcasts(have, need) for have, need in fits):
            raise RegardError(
                "the tensor of a mask does not fit the call",
                got=f"{list(self.table.shape)} for [B, H, Q, K] = {list(shape)}",
                accepted="each axis the call's length, or 1",
            )
        return Keep(moved(table, device))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        places = zip((b, h, q, k), self.table.shape, strict=True)
        return self.table[tuple(i if n > 1 else torch.zeros_like(i) for i, n in places)]

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        q0, q1, k0, k1 = tiles
        if self.table.shape[2] == 1:
            q0, q1 = torch.zeros_like(q0), torch.ones_like(q1)
        if self.table.shape[3] == 1:
            k0, k1 = torch.zeros_like(k0), torch.ones_like(k1)
        return self._areas.judge(q0, q1, k0, k1)

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        return of_table(self.table.to(device), shape)

    def spans_of_rest(self, shape: Shape, device: torch.device) -> Spans | None:
        return of_table(~self.table.to(device), shape)

    def select(self, batch: Pick, heads: Pick) -> Mask:
        table = self.table if self.batch == 1 else self.table[batch]
        return Keep(table if self.heads == 1 else table[:, heads])

    @cached_property
    def _areas(self) -> AreaTable:
        return AreaTable(self.table)


def _with_four_axes(table: Tensor, shape: Shape) -> Tensor:
    if table.ndim != 2:
        raise _ambiguous(table)
    per_query = tuple(table.shape) == (shape.Q, shape.K)
    per_batch = tuple(table.shape) == (shape.B, shape.K)
    if per_query and per_batch and shape.B > 1:
        raise RegardError(
            "a 2-D mask could mean two things here",
            got=f"{list(table.shape)}, which is [Q, K] and also [B, K]",
            accepted="a tensor with its axes said: [B, 1, Q, K] or [B, 1, 1, K]",
            do="pass t[None, None] if its rows are queries, t[:, None, None, :] if they are batch "
            "entries (or masks.padding(lengths))",
        )
    if per_query:
        return table[None, None]
    if per_batch:
        return table[:, None, None]
    raise RegardError(
        "a 2-D mask fits neither queries nor batch",
        got=f"{list(table.shape)}",
        accepted=f"[Q, K] = [{shape.Q}, {shape.K}] or [B, K] = [{shape.B}, {shape.K}]",
    )


def _ambiguous(table: Tensor) -> RegardError:
    return RegardError(
        "the axes of this mask could mean several things",
        got=f"{list(table.shape)}",
        accepted="[K], [Q, K], or [B, H, Q, K] with 1 where an axis does not matter; [B, Q, K] for "
        "inputs [B, N, D]",
        do="[B, Q, K] is t[:, None]; [H, Q, K] is t[None]",
    )


def keep(table: Bool[Tensor, "..."]) -> Mask:
    """True may be seen. Axes: those of the inputs up to H, then Q and K (any of them 1); or [K], or
    an unambiguous 2-D tensor. For inputs [B, H, N, D] that is [B, H, Q, K], for one head [B, Q, K].

    >>> import torch
    >>> print(keep(torch.tensor([True, False, True])).draw(1, 3))
    ██··██
    """
    if not isinstance(table, Tensor):
        raise RegardError(
            "a mask tensor is needed", got=type(table).__name__, accepted="torch.bool tensor"
        )
    if table.dtype != torch.bool:
        raise RegardError(
            "a mask tensor holds booleans",
            got=str(table.dtype),
            accepted="torch.bool",
            do="for numbers that are added to the scores use regard.biases.dense(t); "
            "for 0/1 masks, t.bool()",
        )
    if table.ndim == 0:
        raise _ambiguous(table)
    return Keep(table[None, None, None] if table.ndim == 1 else table)


def ignore(table: Bool[Tensor, "..."]) -> Mask:
    """True is masked: the opposite of `keep`.

    >>> import torch
    >>> print(ignore(torch.tensor([True, False, True])).draw(1, 3))
    ··██··
    """
    return Not(keep(table))
