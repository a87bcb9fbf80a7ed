"""A learned number for each distance between query and key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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
        return self.table[:, self._cell(q, k)][None]

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor, into: list[Tensor]) -> None:
        d = d.sum(0)
        d = d.sum(0, keepdim=True) if self.table.shape[0] == 1 else d
        into[0].index_add_(1, self._cell(q, k).flatten(), d.flatten(1))

    def select(self, batch: Pick, heads: Pick) -> Bias:
        return self if self.table.shape[0] == 1 else Relative(self.table[heads], self.offset)

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        return [() if self.table.shape[0] == 1 else (heads,)]

    def _cell(self, q: Tensor, k: Tensor) -> Tensor:
        assert self.offset is not None
        reach = self.table.shape[1] // 2
        return (k - q[:, None] - self.offset).clamp(-reach, reach) + reach


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
