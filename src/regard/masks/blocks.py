"""Block-sparse layouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from regard.device_copies import moved
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.spans import Spans, of_table
from regard.masks.tiles import AreaTable, Tiles
from regard.values import Pick, Shape, broadcasts, whole


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    layout: Tensor
    size: int

    @property
    def batch(self) -> int:  # type: ignore[override]
        return self.layout.shape[0]

    @property
    def heads(self) -> int:  # type: ignore[override]
        return self.layout.shape[1]

    def bind(self, shape: Shape, device: torch.device) -> Mask:
        need = (-(-shape.Q // self.size), -(-shape.K // self.size))
        have = tuple(self.layout.shape)
        per_head = broadcasts(have[0], shape.B) and broadcasts(have[1], shape.H)
        if not per_head or have[2:] != need:
            raise RegardError(
                f"blocks of {self.size}: the layout does not cover the call",
                got=f"layout {list(have)} for [{shape.B}, {shape.H}, {shape.Q}, {shape.K}]",
                accepted=f"[{shape.B} or 1, {shape.H} or 1, {need[0]}, {need[1]}]",
            )
        return Blocks(moved(self.layout, device), self.size)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        b = b if self.batch > 1 else torch.zeros_like(b)
        h = h if self.heads > 1 else torch.zeros_like(h)
        return self.layout[b, h, q // self.size, k // self.size]

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        size = self.size
        return self._areas.judge(
            tiles.q0 // size,
            (tiles.q1 - 1) // size + 1,
            tiles.k0 // size,
            (tiles.k1 - 1) // size + 1,
        )

    def spans(self, shape: Shape, device: torch.device) -> Spans | None:
        by_block = Shape(shape.B, shape.H, *self.layout.shape[2:])
        first, stop, sure = of_table(self.layout.to(device), by_block)
        block = torch.arange(shape.Q, device=device) // self.size
        edges = (edge[..., block] * self.size for edge in (first, stop))
        first, stop = (edge.clamp_max(shape.K) for edge in edges)
        return Spans(first, stop, sure)

    def select(self, batch: Pick, heads: Pick) -> Mask:
        layout = self.layout if self.batch == 1 else self.layout[batch]
        return Blocks(layout if self.heads == 1 else layout[:, heads], self.size)

    @cached_property
    def _areas(self) -> AreaTable:
        return AreaTable(self.layout)


def blocks(layout: Bool[Tensor, "*bh tq tk"], size: int) -> Mask:
    """Queries and keys in blocks of `size`; `layout` says which block may see which.

    >>> import torch
    >>> print(blocks(torch.tensor([[True, False], [True, True]]), 2).draw(4))
    ████····
    ████····
    ████████
    ████████
    """
    is_tensor = isinstance(layout, Tensor)
    if not is_tensor or layout.dtype != torch.bool or layout.ndim not in (2, 4):
        raise RegardError(
            "blocks takes a layout of booleans, True where a block may be seen",
            got=f"{layout.dtype} {list(layout.shape)}" if is_tensor else type(layout).__name__,
            accepted="torch.bool [query blocks, key blocks] or [B, H, query blocks, key blocks]",
        )
    if whole("blocks: size", size) < 1:
        raise RegardError("blocks: size counts tokens", got=str(size), accepted="1 or more")
    return Blocks(layout if layout.ndim == 4 else layout[None, None], whole("blocks: size", size))
