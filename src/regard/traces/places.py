"""Places on an axis, entries of a batch and regions of a map, from whatever people use to choose
them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import RegardError
from regard.values import Shape, whole

Chosen = int | slice | range | Sequence[int] | Tensor | None
Region = tuple[int, int] | slice | range | None

_FEW = 4096
"""Indices that are checked on the host: a GPU would be waited for with each question about them."""


def places(
    chosen: Chosen, n: int, what: str, device: torch.device, *, once: bool = False
) -> Int[Tensor, "n"]:
    """Indices on an axis of length n, from whatever people use to choose; each `once`, if they are
    a set.

    >>> places([1, 1, -1], 3, "keys", torch.device("cpu"), once=True)
    tensor([1, 2])
    """
    if chosen is None:
        return torch.arange(n, device=device)
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        chosen = [chosen]
    accepted = f"an index, a slice, a list of indices, or {n} booleans"
    try:
        if isinstance(chosen, slice):
            chosen = range(*chosen.indices(n))
        if isinstance(chosen, range):
            chosen = torch.arange(len(chosen)) * chosen.step + chosen.start
        index = torch.as_tensor(chosen)
        index = index.to("cpu" if index.numel() <= _FEW else device)
    except (TypeError, ValueError, RuntimeError):
        raise RegardError(
            f"{what} cannot be chosen by this", got=repr(chosen), accepted=accepted
        ) from None
    if not index.numel():
        index = index.long()
    if index.dtype == torch.bool and index.shape == (n,):
        return index.nonzero().squeeze(-1).to(device)
    if (
        index.ndim != 1
        or index.dtype.is_floating_point
        or index.dtype.is_complex
        or (index.dtype == torch.bool)
    ):
        raise RegardError(
            f"{what} cannot be chosen by this",
            got=f"{index.dtype} {list(index.shape)}",
            accepted=accepted,
        )
    index = index.long()
    if len(index) and (int(index.min()) < -n or int(index.max()) >= n):
        raise RegardError(
            f"{what}: index out of range",
            got=str(index.tolist() if len(index) < 9 else (int(index.min()), int(index.max()))),
            accepted=f"-{n} to {n - 1}",
        )
    index = torch.where(index < 0, index + n, index)
    return (index.unique() if once else index).to(device)


def entries(
    which: Chosen | tuple[Chosen, ...], lead: tuple[int, ...], heads: int, device: torch.device
) -> tuple[Int[Tensor, "*lead"], Chosen]:
    """Batch entries of axes `lead`, as places among all of them, and heads, from an index of each
    axis or of the first of them."""
    # A tuple of one is a list of one place.
    alone = not isinstance(which, tuple) or len(which) < 2
    indices: tuple[Chosen, ...] = (which,) if alone else which  # type: ignore[assignment]
    if len(indices) > len(lead) + 1:
        raise RegardError(
            "a trace is chosen from by batch and head",
            got=f"{len(indices)} indices for axes {[*lead, heads]}",
            accepted=f"{len(lead) + 1} indices at most",
        )
    batch = torch.arange(math.prod(lead), device=device).view(lead)
    for axis, n in enumerate(lead):
        if axis < len(indices):
            batch = batch.index_select(axis, places(indices[axis], n, "batch", device))
    return batch, indices[len(lead)] if len(indices) > len(lead) else None


def pooled_region(
    shape: Shape, cells: int | tuple[int, int], queries: Region, keys: Region, pool: str
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """How many cells a map has, and where its queries and keys start and stop."""
    rows, columns = region_of(queries, shape.Q, "queries"), region_of(keys, shape.K, "keys")
    wanted = tuple(cells) if isinstance(cells, (tuple, list)) else (cells, cells)
    if len(wanted) != 2:
        raise RegardError("map: cells are a number, or (rows, columns)", got=repr(cells))
    if min(whole("map: a number of cells", n) for n in wanted) < 1:
        raise RegardError("map counts cells", got=str(cells), accepted="1 or more")
    if pool not in ("mean", "max", "sum"):
        raise RegardError("map: unknown pool", got=repr(pool), accepted="'mean', 'max' or 'sum'")
    size = min(wanted[0], rows[1] - rows[0]), min(wanted[1], columns[1] - columns[0])
    return size, rows, columns


def region_of(region: Region, n: int, what: str, asked: str = "map") -> tuple[int, int]:
    """Where a region starts and stops, from whatever people use to name one."""
    match region:
        case None:
            return 0, n
        case slice(step=None | 1):
            with suppress(TypeError):
                start, stop, _ = region.indices(n)
                return start, max(start, stop)
        case range(start=start, stop=stop, step=1) if 0 <= start <= stop <= n:
            return start, stop
        case (start, stop) if not isinstance(region, range):
            start, stop = (whole(f"{asked}: an end of a region of {what}", i) for i in region)
            if 0 <= start <= stop <= n:
                return start, stop
    raise RegardError(
        f"{asked}: a region of {what} is (start, stop)",
        got=str(region),
        accepted=f"0 <= start <= stop <= {n}; or a slice or range without steps",
    )
