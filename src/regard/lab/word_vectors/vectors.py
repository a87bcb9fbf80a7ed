"""A vector for each word, and what is near."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize


@dataclass(frozen=True)
class Vectors:
    """A vector of length 1 for each word."""

    names: list[str]
    rows: Float[Tensor, "v d"]
    read: int = 0
    """How many words they were trained on; 0 where that is not known."""

    @staticmethod
    def of(names: list[str], rows: Float[Tensor, "v d"], read: int = 0) -> Vectors:
        """Less the mean of all: what all words share says nothing about any of them."""
        return Vectors(names, normalize(rows - rows.mean(0), dim=1), read)

    @cached_property
    def place(self) -> dict[str, int]:
        """The row of each word."""
        return {name: i for i, name in enumerate(self.names)}

    def __getitem__(self, word: str) -> Float[Tensor, "d"]:
        return self.rows[self.place[word]]

    def has(self, *words: str) -> bool:
        """Whether all of these have a vector."""
        return all(word in self.place for word in words)

    def nearest(self, to: Float[Tensor, "d"], count: int) -> list[str]:
        """The words nearest to a vector, nearest first."""
        found = (self.rows @ to).topk(min(count, len(self.names)))
        return [self.names[i] for i in found.indices.tolist()]

    def rank(self, word: str, to: Float[Tensor, "d"], without: Sequence[str] = ()) -> int:
        """The place of a word among all, by how near they are: 1 is nearest."""
        near = self.rows @ to
        here = near[self.place[word]].item()
        near[[self.place[other] for other in without]] = -2.0
        return int((near > here).sum()) + 1
