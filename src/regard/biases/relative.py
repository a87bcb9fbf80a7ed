"""A learned number for each distance between query and key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard.arguments import refuse_no_tensor
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.values import Pick, Shape, broadcasts, end_aligned, whole


@dataclass(frozen=True, eq=False, repr=False)
class Relative(Bias):
    table: Tensor
    offset: int | None = None

    def bind(self, shape: Shape, device: torch.device) -> Bias:
        if not broadcasts(self.table.shape[0], shape.H):
            raise RegardError(
                "relative: one row per head",
                got=f"a table {list(self.table.shape)} for {shape.H} heads",
                accepted=f"[{shape.H} or 1, 2·reach + 1]",
            )
        return Relative(self.table, end_aligned(self.offset, shape))

    def at(self, q: Tensor, k: Tensor) -> Float[Tensor, "1 h q k"]:
        return self.table[:, self._cell(k - q[:, None])][None]

    def within(self, rows: slice, keys: slice, device: torch.device) -> Float[Tensor, "1 h q k"]:
        # Each query has the distances of the next one, moved by one place.
        band = self.table[:, self._cells(rows, keys, device)]
        return band.unfold(1, keys.stop - keys.start, 1).flip(1)[None]

    def of_distances(self, distances: Tensor) -> Float[Tensor, "#h n"]:
        return self.table[:, self._cell(distances)]

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor, into: list[Tensor]) -> None:
        cell = self._cell(k - q[:, None]).flatten()
        into[0].index_add_(1, cell, self._shared(d).flatten(1))

    def pull_back_within(self, rows: slice, keys: slice, d: Tensor, into: list[Tensor]) -> None:
        # Every row is one place longer than a step through memory: columns are distances.
        n, m = d.shape[2:]
        moved = F.pad(self._shared(d).flip(1), (0, n)).flatten(1)[:, : n * (n + m - 1)]
        band = moved.unflatten(1, (n, -1)).sum(1)
        into[0].index_add_(1, self._cells(rows, keys, d.device), band)

    def select(self, batch: Pick, heads: Pick) -> Bias:
        return self if self.table.shape[0] == 1 else Relative(self.table[heads], self.offset)

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        return [() if self.table.shape[0] == 1 else (heads,)]

    def _shared(self, d: Tensor) -> Float[Tensor, "h q k"]:
        """Gradients of pairs, added up over what shares a table."""
        d = d.sum(0)
        return d.sum(0, keepdim=True) if self.table.shape[0] == 1 else d

    def _cells(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """Those of all distances between a run of queries and one of keys, the least first."""
        least, most = keys.start - rows.stop + 1, keys.stop - rows.start
        return self._cell(torch.arange(least, most, device=device))

    def _cell(self, distance: Tensor) -> Tensor:
        assert self.offset is not None
        reach = self.table.shape[1] // 2
        return (distance - self.offset).clamp(-reach, reach) + reach


def relative(table: Float[Tensor, "h distances"], *, offset: int | None = None) -> Bias:
    """table[head, distance + reach], for distances from -reach to reach; farther ones use the ends.

    >>> import regard, torch
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> back = torch.tensor([[2.0, 0.0, 0.0]])          # likes what came before
    >>> regard.trace(x, x, x, bias=relative(back)).weights(queries=[1])
    tensor([[[[0.7870, 0.1065, 0.1065]]]])
    """
    accepted = "a floating-point tensor [H or 1, odd number of distances]"
    refuse_no_tensor("relative: the table", table, accepted)
    if table.ndim != 2 or table.shape[1] % 2 == 0 or not table.is_floating_point():
        raise RegardError(
            "relative: a table with one column per distance, -reach to reach",
            got=f"{table.dtype} {list(table.shape)}",
            accepted=accepted,
        )
    return Relative(table, None if offset is None else whole("offset", offset))
