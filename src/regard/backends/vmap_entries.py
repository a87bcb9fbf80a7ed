"""A call that vmap maps over an axis, as calls of fewer axes.

Where only q, k, v (and what belongs to their rows) are mapped, entries of the axis become batch
entries, which mean the same: many of them are one call. Where a sink, a bias, a mask or the seed of
dropout is mapped too, each entry is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.backends.passes import Call, taken_apart

MOST = 65_535
"""Heads of all batch entries in one call: as many as a CUDA kernel has programs for."""
Axis = int | None


class Lot:
    """Some entries of a mapped axis, as one call."""

    def __init__(self, start: int, stop: int, batch: int, *, folded: bool) -> None:
        self.start, self.stop, self.batch, self.folded = start, stop, batch, folded
        self.call: Call
        self.tensors: list[Tensor | None]

    def part(self, t: Tensor | None, axis: Axis) -> Tensor | None:
        """The only entry of a tensor that has no batch axis, or is alone."""
        return t if t is None or axis is None else t.select(axis, self.start)

    def rows(self, t: Tensor | None, axis: Axis, batch_axis: int = 0) -> Tensor | None:
        """Entries of a tensor [B, ...] as its batch entries."""
        if t is None or not self.folded:
            return self.part(t, axis)
        many = self.stop - self.start
        some = slice(self.start, self.stop)
        t = t.expand(many, *t.shape) if axis is None else t.movedim(axis, 0)[some]
        if t.ndim == 2:
            # Statistics that were not asked for are empty: [0].
            return t[0]
        return t.movedim(0, batch_axis).flatten(batch_axis, batch_axis + 1)

    def kept(self, t: Tensor, axis: Axis) -> Tensor | None:
        """The same of what a forward pass keeps: one or several numbers of each row."""
        return self.rows(t, axis, t.ndim - (axis is not None) - 3)

    def restored(self, t: Tensor, batch_axis: int = 0) -> Tensor:
        """An answer with the mapped axis in front again."""
        if not self.folded:
            return t[None]
        many = self.stop - self.start
        if t.ndim == 1:
            return t.expand(many, -1)
        apart: Tensor = t.unflatten(batch_axis, (many, self.batch))
        return apart.movedim(batch_axis, 0)


def lots(
    call: Call,
    tensors: Sequence[Tensor | None],
    axes: Sequence[Axis],
    size: int,
    *,
    alone: bool = False,
) -> Iterator[Lot]:
    """The entries of a mapped axis; `alone` asks for one at a time."""
    q, q_axis = tensors[0], axes[0]
    assert q is not None
    batch, heads = [n for i, n in enumerate(q.shape) if i != q_axis][:2]
    # Which weights are dropped depends on their place in the batch.
    folded = not alone and not call.dropout and all(axis is None for axis in axes[3:])
    step = max(1, MOST // max(batch * heads, 1)) if folded else 1
    # An axis of length 0 still says what its answers look like.
    for start in range(0, max(size, 1), step):
        lot = Lot(start, min(start + step, size), batch, folded=folded)
        parts = [
            lot.rows(t, axis) if i < 3 else lot.part(t, axis)
            for i, (t, axis) in enumerate(zip(tensors, axes, strict=True))
        ]
        lot.call, lot.tensors = call, parts
        if folded:
            lot.call, lot.tensors = _repeated(call, parts, batch, lot.stop - lot.start)
        yield lot


def _repeated(
    call: Call, tensors: list[Tensor | None], batch: int, many: int
) -> tuple[Call, list[Tensor | None]]:
    """A call whose mask and bias speak of as many batch entries as its queries."""
    x = call.inputs(*tensors)  # type: ignore[arg-type]
    assert x.q is not None
    places = torch.arange(batch, device=x.q.device).repeat(many)
    everything = slice(None)
    return taken_apart(
        replace(
            x,
            mask=None if x.mask is None else x.mask.select(places, everything),
            bias=None if x.bias is None else x.bias.select(places, everything),
        )
    )


def gathered(
    found: Sequence[Sequence[Tensor]],
) -> tuple[tuple[Tensor, ...], tuple[Axis, ...]]:
    """The answers of all lots, each as one tensor mapped over its first axis."""
    whole = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
    return whole, (0,) * len(whole)


def each(
    entries: Iterator[Lot], answer: Callable[[Lot], Sequence[Tensor]]
) -> tuple[tuple[Tensor, ...], tuple[Axis, ...]]:
    """What vmap wants: answers for every entry, and which axis is mapped."""
    return gathered([answer(lot) for lot in entries])
