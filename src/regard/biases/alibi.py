"""Attention with linear biases: far keys count less, each head by its own slope."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import counted, described
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.values import Pick, Shape, end_aligned, whole


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Bias):
    slopes: Tensor
    offset: int | None = None

    def bind(self, shape: Shape, device: torch.device) -> Bias:
        if len(self.slopes) != shape.H:
            raise RegardError(
                "alibi: one slope per head",
                got=f"{len(self.slopes)} slopes for {shape.H} heads",
                accepted=f"[{shape.H}]",
            )
        return Alibi(self.slopes, end_aligned(self.offset, shape))

    def computed_in(self, dtype: torch.dtype) -> Bias:
        return Alibi(self.slopes.to(dtype), self.offset)

    def to(self, device: torch.device | str) -> Alibi:
        # Plain floats are kept in float64, which MPS does not have.
        mps = torch.device(device).type == "mps"
        slopes = self.slopes.float() if mps and self.slopes.dtype == torch.float64 else self.slopes
        return Alibi(slopes.to(device), self.offset)

    def at(self, q: Tensor, k: Tensor) -> Float[Tensor, "1 h q k"]:
        distance = self._distance(k - q[:, None])
        return (-self.slopes[:, None, None].to(distance.dtype) * distance)[None]

    def of_distances(self, distances: Tensor) -> Float[Tensor, "h n"]:
        distance = self._distance(distances)
        return -self.slopes[:, None].to(distance.dtype) * distance

    def pull_back(self, q: Tensor, k: Tensor, d: Tensor, into: list[Tensor]) -> None:
        into[0] -= (d * self._distance(k - q[:, None])).sum((0, 2, 3))

    def select(self, batch: Pick, heads: Pick) -> Bias:
        return Alibi(self.slopes[heads], self.offset)

    def pick(self, batch: Pick, heads: Pick) -> list[tuple[Pick, ...]]:
        return [(heads,)]

    def _distance(self, from_query: Tensor) -> Tensor:
        assert self.offset is not None
        # Half precision knows no neighbours among far places.
        dtype = torch.promote_types(self.slopes.dtype, torch.float32)
        return (from_query - self.offset).abs().to(dtype)


def alibi(slopes: Float[Tensor, "h"] | Sequence[float], *, offset: int | None = None) -> Bias:
    """-slope · |distance|, one slope per head; slopes may be learned.

    >>> import regard, torch
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> regard.trace(x, x, x, bias=alibi([0.0, 1.0])).weights(queries=[2])
    tensor([[[[0.3333, 0.3333, 0.3333]],
    <BLANKLINE>
             [[0.0900, 0.2447, 0.6652]]]])
    """
    tensor = slopes
    if not isinstance(slopes, Tensor):
        with suppress(TypeError, ValueError, RuntimeError):
            tensor = torch.tensor(slopes)
            if tensor.is_floating_point():
                tensor = torch.tensor(slopes, dtype=torch.float64)
    if not isinstance(tensor, Tensor) or tensor.ndim != 1 or not tensor.is_floating_point():
        raise RegardError(
            "alibi: one slope per head",
            got=described(tensor),
            accepted="a floating-point tensor [H], or so many floats",
        )
    return Alibi(tensor, None if offset is None else whole("offset", offset))


def slopes(heads: int) -> Float[Tensor, "h"]:
    """The slopes of the ALiBi paper for any number of heads: a geometric series from 2^(-8/n).

    >>> slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    heads = counted("slopes: heads", heads)
    power = 1 << max(heads.bit_length() - 1, 0)
    first = [2.0 ** (-8 * (i + 1) / power) for i in range(min(power, heads))]
    # A number of heads between two powers of two borrows every other slope of the next.
    between = [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(first + between)
