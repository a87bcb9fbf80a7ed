"""Which tokens of a sequence each rank has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from regard.arguments import described
from regard.errors import RegardError
from regard.parallel.collectives import Replicated
from regard.parallel.ranks import Mesh, ranks_of
from regard.values import whole

Run = tuple[int, int]
"""Tokens that stand side by side: the first, and the first behind them."""


class Places(NamedTuple):
    """Where tokens are once the shards of all ranks, each filled up to the longest, are laid end to
    end. None where they are in order already."""

    of_tokens: Int[Tensor, "s"] | None
    """For each token of the sequence, its place in the shards."""
    of_slots: Int[Tensor, "slots"] | None
    """For each place in the shards, its token; any token where there is none."""


@dataclass(frozen=True)
class Layout:
    """Which tokens each rank has: all of a sequence, each once. A rank holds its own in the order
    of the sequence.

    >>> zigzag(8, 2).positions(1)
    tensor([2, 3, 4, 5])
    """

    runs: tuple[tuple[Run, ...], ...]
    """For each rank, the runs of tokens it has."""
    made_by: str = field(compare=False)

    def __post_init__(self) -> None:
        if not _are_runs(self.runs):
            raise RegardError(
                "runs= has the runs of tokens of each rank",
                got=described(self.runs),
                accepted="for each rank pairs (start, stop): (((0, 4),), ((4, 8),))",
            )
        for rank, mine in enumerate(self.runs):
            for (_, before), (start, stop) in itertools.pairwise([(0, 0), *mine]):
                if not before <= start <= stop:
                    raise RegardError(
                        f"rank {rank} holds its tokens in the order of the sequence",
                        got=f"tokens {start} to {stop} after what ends at {before}",
                        accepted="runs (start, stop) that rise",
                        do="sort the runs, and the tokens that the rank has",
                    )
        every = sorted(run for mine in self.runs for run in mine if run[0] < run[1])
        for (_, before), (start, stop) in itertools.pairwise([(0, 0), *every]):
            if start != before:
                raise RegardError(
                    "a layout has all tokens of a sequence, each once",
                    got=f"tokens {start} to {stop} after what ends at {before}",
                    accepted="runs that go on where others end, from 0",
                )

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank has."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def length(self) -> int:
        """How many tokens the sequence has."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Int[Tensor, "n"]:
        """Where the tokens of a rank stand in the sequence."""
        at = torch.device(device)
        if (rank, at) not in self._positions:
            # What is made for inference could not be used by a call that learns.
            with torch.inference_mode(False):
                runs = [torch.arange(*run) for run in self.runs[rank]]
                found = torch.cat(runs) if runs else torch.arange(0)
                self._positions[rank, at] = found.to(at)
        return self._positions[rank, at]

    def shard(self, x: Tensor, dim: int, rank: int | Mesh | None = None) -> Tensor:
        """What a rank has of a tensor that every rank has: this one, of a mesh or of all processes,
        or one by its number.

        >>> zigzag(8, 2).shard(torch.arange(8), 0, rank=0)
        tensor([0, 1, 6, 7])
        """
        who = rank if isinstance(rank, int) else ranks_of(rank).rank
        if x.shape[dim] != self.length:
            raise RegardError(
                f"{self!r} is a layout of {self.length} tokens",
                got=f"{x.shape[dim]} along axis {dim} of {list(x.shape)}",
            )
        return x.index_select(dim, self.positions(who, x.device))

    def unshard(self, x: Tensor, dim: int, mesh: Mesh | None = None) -> Tensor:
        """The whole tensor, on every rank, from what each has. All ranks must ask.

        Differentiable: what every rank has is counted once, so that a loss of the whole, computed
        on every rank, gives each the gradient of its own part.
        """
        ranks = ranks_of(mesh)
        self.check(ranks.rank, ranks.size, x.shape[dim], f"axis {dim} of {list(x.shape)}")
        parts = Replicated.apply(ranks, self.filled(x.movedim(dim, 0)))  # type: ignore[no-untyped-call]
        return self.in_order(parts.flatten(0, 1), 0).movedim(0, dim)

    def filled(self, x: Tensor, dim: int = 0) -> Tensor:
        """A shard filled up to the longest one, so that all are alike."""
        missing = self.longest - x.shape[dim]
        if not missing:
            return x
        size = [*x.shape]
        size[dim] = missing
        return torch.cat([x, x.new_zeros(size)], dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """Filled shards, end to end, as the sequence."""
        return _picked(x, dim, self._places(x.device).of_tokens)

    def in_shards(self, x: Tensor, dim: int) -> Tensor:
        """A sequence as filled shards, end to end."""
        return _picked(x, dim, self._places(x.device).of_slots)

    def check(self, rank: int, size: int, tokens: int, what: str) -> None:
        """Refuse a shard that is not the one a rank has."""
        if self.ranks != size:
            raise RegardError(
                f"{self!r} is a layout for {self.ranks} ranks", got=f"a mesh of {size}"
            )
        if tokens != self.lengths[rank]:
            raise RegardError(
                f"rank {rank} has {self.lengths[rank]} tokens by {self!r}",
                got=f"{tokens} in {what}",
                accepted="what layout.shard(x, dim, mesh) gives of the whole sequence",
            )

    def _places(self, device: torch.device) -> Places:
        if device not in self._indices:
            n = self.longest
            with torch.inference_mode(False):
                of_tokens = torch.zeros(self.length, dtype=torch.int64)
                of_slots = torch.zeros(self.ranks * n, dtype=torch.int64)
                for rank, length in enumerate(self.lengths):
                    slots = torch.arange(rank * n, rank * n + length)
                    of_tokens[self.positions(rank)] = slots
                    of_slots[slots] = self.positions(rank)
                plain = len(of_tokens) == len(of_slots) and torch.equal(
                    of_tokens, torch.arange(len(of_tokens))
                )
                found = (None, None) if plain else (of_tokens.to(device), of_slots.to(device))
            self._indices[device] = Places(*found)
        return self._indices[device]

    @cached_property
    def _positions(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    @cached_property
    def _indices(self) -> dict[torch.device, Places]:
        return {}

    def __repr__(self) -> str:
        return self.made_by


def contiguous(length: int, ranks: int) -> Layout:
    """Each rank has one run, and the runs differ by one token at most. With a causal mask the last
    rank has most of the work, where ranks have queries each (method "all_gather").

    >>> contiguous(5, 2).lengths
    (2, 3)
    """
    length, ranks = _counts("contiguous", length, ranks)
    edges = _edges(length, ranks)
    return _layout([[run] for run in edges], f"contiguous({length}, {ranks})")


def zigzag(length: int, ranks: int) -> Layout:
    """Each rank has a run from the front and one from the back, which under a causal mask is as
    much work for all.

    >>> zigzag(8, 2).runs
    (((0, 2), (6, 8)), ((2, 6),))
    """
    length, ranks = _counts("zigzag", length, ranks)
    return _layout(_folded(_edges(length, 2 * ranks)), f"zigzag({length}, {ranks})")


def by_document(lengths: Sequence[int] | Int[Tensor, "documents"], ranks: int) -> Layout:
    """Each document zigzag over all ranks: as much work for all also where each token sees only its
    own document. `lengths` are those of the documents, end to end.

    >>> by_document([4, 8], 2).runs
    (((0, 1), (3, 4), (6, 10)), ((1, 3), (4, 6), (10, 12)))
    """
    each = [whole("by_document: a length", n) for n in _listed(lengths)]
    _, ranks = _counts("by_document", sum(each), ranks)
    if min(each, default=0) < 0:
        raise RegardError("by_document takes lengths", got=str(min(each)), accepted="0 or more")
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    starts = itertools.accumulate([0, *each[:-1]])
    for i, (first, n) in enumerate(zip(starts, each, strict=True) if each else ()):
        for rank, mine in enumerate(_folded(_edges(n, 2 * ranks))):
            # Where tokens are left over, another rank takes them in the next document.
            runs[(rank + i) % ranks] += [(first + a, first + b) for a, b in mine]
    few = ", ".join(map(str, each[:6])) + (", …" if len(each) > 6 else "")
    return _layout(runs, f"by_document([{few}], {ranks})")


def run_inside(places: Int[Tensor, "n"], region: tuple[int, int]) -> Run:
    """Which places, that rise, are in a region: the first, and the first behind them."""
    first, stop = torch.searchsorted(places, places.new_tensor(region)).tolist()
    return first, stop


def _picked(x: Tensor, dim: int, index: Int[Tensor, "n"] | None) -> Tensor:
    if index is None:
        return x
    if dim == x.ndim - 1:
        # Single numbers, which index_select copies one by one, as if each were a row.
        return x.gather(dim, index.expand(*x.shape[:-1], -1))
    return x.index_select(dim, index)


def _listed(lengths: Sequence[int] | Tensor) -> list[int]:
    if not isinstance(lengths, (Tensor, Iterable)) or getattr(lengths, "ndim", 1) != 1:
        raise RegardError(
            "by_document takes lengths", got=described(lengths), accepted="a list of whole numbers"
        )
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _counts(name: str, length: int, ranks: int) -> tuple[int, int]:
    length, ranks = whole(f"{name}: length", length), whole(f"{name}: ranks", ranks)
    if length < 0 or ranks < 1:
        raise RegardError(
            f"{name} cuts tokens for ranks",
            got=f"{length} tokens, {ranks} ranks",
            accepted="0 tokens or more, 1 rank or more",
        )
    return length, ranks


def _edges(length: int, parts: int) -> list[Run]:
    return [(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


def _folded(edges: list[Run]) -> list[list[Run]]:
    """The first and the last run for the first rank, and so on inwards."""
    return [[edges[i], edges[-1 - i]] for i in range(len(edges) // 2)]


def _layout(runs: Iterable[Iterable[Run]], made_by: str) -> Layout:
    return Layout(tuple(tuple(_joined(mine)) for mine in runs), made_by)


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Runs without empty ones, and those side by side as one."""
    found: list[Run] = []
    for start, stop in runs:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found


def _are_runs(runs: object) -> bool:
    def are(items: object, fit: Callable[[object], bool]) -> bool:
        return isinstance(items, (tuple, list)) and all(map(fit, items))

    def is_run(run: object) -> bool:
        return are(run, lambda place: isinstance(place, int)) and len(run) == 2  # type: ignore[arg-type]

    return are(runs, lambda mine: are(mine, is_run)) and bool(runs)
