"""What counting and drawing ask of a mask, once its lengths are known."""

from __future__ import annotations

from jaxtyping import Bool, Int8
from torch import Tensor

from regard.masks.tiles.states import Tiles


class PairRule:
    """Which pairs of queries and keys are allowed. Bound masks answer."""

    batch: int = 1
    """How many batch entries the mask distinguishes: 1 when it is the same for all."""
    heads: int = 1
    """How many heads the mask distinguishes."""
    relative: bool = False
    """Whether only the distance between key and query matters."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Bool[Tensor, "..."]:
        """Whether pairs are allowed; indices broadcast."""
        raise NotImplementedError

    def judge(self, tiles: Tiles) -> Int8[Tensor, "b h t"]:
        """EMPTY, PARTIAL or FULL for each tile, without looking at its pairs."""
        raise NotImplementedError

    def band(self) -> tuple[float, float] | None:
        """(low, high) when the mask allows exactly low <= k - q <= high."""
        return None
