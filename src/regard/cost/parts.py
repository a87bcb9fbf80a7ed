"""The parts of the work: what each multiplies, and what it moves.

One multiplication with its addition is one MAC, the textbooks' unit, and two FLOPs. Only matrix
products are counted: exponentials, norms and other functions of single numbers are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from regard.cost.call_counts import dense_pairs, needed_pairs, visited_pairs
from regard.inputs import AttentionInputs

Count = Literal["needed", "executed", "dense"]
Step = Literal["forward", "backward", "training"]
TILE = (128, 128)
"""Queries and keys of the tiles in which fused kernels work, unless told."""


class Counts(NamedTuple):
    """One thing counted three ways."""

    needed: int
    """Exactly the pairs that the mask allows."""
    executed: int
    """The pairs of all tiles that hold an allowed one: what a fused kernel computes."""
    dense: int
    """All pairs: what eager code computes."""

    def of(self, count: Count) -> int:
        """One of them by name."""
        return {"needed": self.needed, "executed": self.executed, "dense": self.dense}[count]

    def times(self, n: int) -> Counts:
        return Counts(*(n * count for count in self))

    def plus(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Part:
    """One kind of product: its MACs in a forward pass, and the bytes that it moves."""

    name: str
    macs: Counts
    fused_bytes: int
    """Operands read once, results written once."""
    eager_bytes: int
    """The same, and every pass over the n×n matrix between."""
    pairwise: bool = False
    """Whether it grows with the pairs of tokens."""
    again: int = 0
    """MACs that a fused backward pass does a second time, because nothing was kept."""

    def flops(self, count: Count = "needed", step: Step = "forward") -> int:
        """FLOPs. Backward, each product has two: one for the gradient of each factor."""
        passes = {"forward": 1, "backward": 2, "training": 3}[step]
        again = self.again if count == "executed" and step != "forward" else 0
        return 2 * (passes * self.macs.of(count) + again)

    def moved(self, how: Literal["fused", "eager"] = "fused", step: Step = "forward") -> int:
        """Bytes moved. Each of the two products backward moves as much as the one forward."""
        passes = {"forward": 1, "backward": 2, "training": 3}[step]
        return passes * (self.fused_bytes if how == "fused" else self.eager_bytes)

    def times(self, n: int) -> Part:
        """So many of it."""
        return Part(
            self.name, self.macs.times(n), n * self.fused_bytes, n * self.eager_bytes,
            self.pairwise, n * self.again,
        )  # fmt: skip

    def plus(self, other: Part) -> Part:
        """Two of a name, added up."""
        return Part(
            self.name, self.macs.plus(other.macs), self.fused_bytes + other.fused_bytes,
            self.eager_bytes + other.eager_bytes, self.pairwise, self.again + other.again,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        return {
            "macs": self.macs._asdict(),
            "flops": {
                step: {count: self.flops(count, step) for count in Counts._fields}  # type: ignore[arg-type]
                for step in ("forward", "backward", "training")
            },
            "bytes_moved": {"eager": self.eager_bytes, "fused": self.fused_bytes},
        }


def linear(name: str, rows: int, taken: int, given: int, itemsize: int) -> Part:
    """A matrix that takes rows of one width and gives rows of another.

    >>> linear("up", 10, 4, 16, 2).macs.dense
    640
    """
    macs = rows * taken * given
    moved = itemsize * (rows * taken + taken * given + rows * given)
    return Part(name, Counts(macs, macs, macs), moved, moved)


def pairs(x: AttentionInputs, tile: tuple[int, int] = TILE) -> Counts:
    """Query-key pairs of a call, over all batch entries and heads."""
    return Counts(needed_pairs(x), visited_pairs(x, *tile), dense_pairs(x))
