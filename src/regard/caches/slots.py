"""What is known of the keys that one layer of a cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Slots:
    """For each slot of each key head: the position of its token, whether it holds one, its score.

    Heads may hold different numbers of tokens. The tokens of a head stand at the end of its slots,
    in their order, so that new ones follow them; slots before them hold nothing and are masked.
    """

    positions: Int32[Tensor, "b g s"]
    filled: Bool[Tensor, "b g s"]
    scores: Float[Tensor, "b g s"]
    full: bool = True
    """Whether all of them hold a token; known without asking the device."""

    @classmethod
    def none(cls, keys: Float[Tensor, "b g n d"]) -> Slots:
        """No slots yet, for heads like those of some keys."""
        empty = torch.zeros(*keys.shape[:2], 0, device=keys.device)
        return cls(empty.int(), empty.bool(), empty)

    def append(self, many: int, position: int) -> Slots:
        """With so many new tokens, the first of which stands at a position."""
        new = torch.arange(
            position, position + many, dtype=torch.int32, device=self.positions.device
        )
        positions = torch.cat([self.positions, new.expand(*self.positions.shape[:2], -1)], -1)
        filled, scores = pad(self.filled, (0, many), value=True), pad(self.scores, (0, many))
        return Slots(positions, filled, scores, self.full)

    def scored(self, scores: Float[Tensor, "b g s"]) -> Slots:
        return replace(self, scores=scores)

    def pack(self, keep: Bool[Tensor, "b g s"]) -> tuple[Slots, Int[Tensor, "b g kept"]]:
        """Only the slots that stay, in as few columns as the fullest head needs; and which of the
        columns before they are."""
        counts = keep.sum(-1)
        most, least = int(counts.max()), int(counts.min())
        # A stable sort: what goes, then what stays, each in its order.
        columns = keep.byte().argsort(dim=-1, stable=True)[..., keep.shape[-1] - most :]
        filled = keep.gather(-1, columns)
        packed = Slots(
            self.positions.gather(-1, columns), filled, self.scores.gather(-1, columns),
            full=most == least,
        )  # fmt: skip
        return packed, columns

    def change(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """Along the batch: repeated, chosen or put in another order."""
        return Slots(change(self.positions), change(self.filled), change(self.scores), self.full)

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.positions, self.filled, self.scores))
