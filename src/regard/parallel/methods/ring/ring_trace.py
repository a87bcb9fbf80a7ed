"""What the queries of one rank saw while keys went round; to look again, they go round again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.contract import Pool, Rows, SecondPass, Top
from regard.backends.questions.block_mass import head_sums, kept_mass
from regard.backends.tiled.second_pass import ChosenBlocks, KeyBlocks, cuts
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.parallel.layout import run_inside
from regard.parallel.methods.ring.block_questions import (
    Answer,
    BlockQuestion,
    Largest,
    OfKeys,
    Total,
)
from regard.parallel.methods.ring.blocks import Block
from regard.parallel.methods.ring.exact_rows import exact_lse, widened
from regard.parallel.methods.ring.ring_pass import RingPass
from regard.parallel.own_rows import OwnRows
from regard.traces import Trace
from regard.values import whole


@dataclass(frozen=True)
class _Top(BlockQuestion):
    """The strongest keys of each query, strongest first; of equal ones the first."""

    trace: RingTrace
    n: int

    def ask(self, block: Block, row: Tensor | None) -> Answer:
        values, indices = self.trace.of(block, row).top(self.n)
        return values, torch.where(indices < 0, -1, block.places[indices.clamp_min(0)])

    def nothing(self, x: AttentionInputs) -> Answer:
        n = min(self.n, self.trace.ring_pass.blocks.key_layout.length)
        values = self.trace.rows.lse.detach().new_zeros(*x.shape[:3], n)
        return values, torch.full_like(values, -1, dtype=torch.int64)

    def joined(self, answer: Answer, found: Answer) -> Answer:
        values, indices = (torch.cat(pair, -1) for pair in zip(answer, found, strict=True))
        by_place = torch.where(indices < 0, self.trace.ring_pass.blocks.key_layout.length, indices)
        order = by_place.argsort(-1)
        values, indices = values.gather(-1, order), indices.gather(-1, order)
        # A key whose weight is too small for its number still comes before none.
        strength = torch.where(indices < 0, -1.0, values)
        best = strength.sort(stable=True, dim=-1, descending=True).indices[
            ..., : answer[0].shape[-1]
        ]
        return values.gather(-1, best), indices.gather(-1, best)


@dataclass(frozen=True)
class _Spread(BlockQuestion):
    """The variance and the least of each query's logits."""

    trace: RingTrace

    def ask(self, block: Block, _: Tensor | None) -> Answer:
        x, look = block.inputs, self.trace.second_pass
        count, (variance, lowest) = _seen(x), look.logit_spread(x)
        return count, torch.where(count > 0, look.mean_logit(x), 0.0), variance * count, lowest

    def nothing(self, x: AttentionInputs) -> Answer:
        zeros = x.q.new_zeros(x.shape[:3], dtype=x.compute_dtype)
        return zeros, zeros, zeros, torch.full_like(zeros, math.inf)

    def joined(self, answer: Answer, found: Answer) -> Answer:
        # Squares of distances from the mean, without the loss of digits that Σ s² - (Σ s)² has.
        (before, mean, square, lowest), (here, middle, away, least) = answer, found
        both, apart = (before + here).clamp_min(1), middle - mean
        square = square + away + apart.square() * before * here / both
        return before + here, mean + apart * here / both, square, torch.minimum(lowest, least)

    def ended(self, x: AttentionInputs, answer: Answer) -> Answer:
        count, _, square, lowest = answer
        return square / count.clamp_min(1), lowest


@dataclass(frozen=True, eq=False, repr=False)
class RingTrace(OwnRows):
    """The queries, keys and values of this rank, and what its queries saw of all keys."""

    inputs: AttentionInputs
    rows: Rows
    ring_pass: RingPass
    backend: str
    second_pass: SecondPass

    @property
    def mean_logit(self) -> Float[Tensor, "b h n"]:
        def ask(block: Block, _: Tensor | None) -> Answer:
            count = _seen(block.inputs)
            mean = self.of(block, self.lse.detach()).mean_logit
            return torch.where(count > 0, mean, 0.0) * count, count

        zeros = torch.zeros_like(self.lse.detach())
        total, count = self.ring_pass.ask(Total(ask, lambda: (zeros, zeros)), self.inputs, None)
        return torch.where(count > 0, total / count.detach().clamp_min(1), -math.inf)

    @property
    def std_logit(self) -> Float[Tensor, "b h n"]:
        variance, _ = self._spread()
        return variance.sqrt()

    @property
    def min_logit(self) -> Float[Tensor, "b h n"]:
        _, lowest = self._spread()
        return lowest

    @torch.no_grad()
    def _spread(self) -> Answer:
        return self.ring_pass.once(_Spread(self), self.inputs.map_tensors(Tensor.detach), None)

    def received(self) -> Float[Tensor, "b h m"]:
        """By the keys of this rank, from the queries of all."""
        return self._weighed(OfKeys(lambda block, row: (self.of(block, row).received(),)))

    def top(self, n: int) -> Top:
        if whole("top: n", n) < 1:
            raise RegardError("top counts keys", got=str(n), accepted="1 or more")
        with torch.no_grad():
            x, row = self._asked()
            x = x.map_tensors(Tensor.detach)
            values, indices = self.ring_pass.once(_Top(self, n), x, row.detach())
        return Top(values.to(self.lse.dtype), indices)

    def mass(self, keys: Int[Tensor, "k"]) -> Float[Tensor, "b h n"]:
        def ask(block: Block, row: Tensor | None) -> Answer | None:
            _, slots = _found(block.places, keys)
            return (self.of(block, row).mass(slots),) if len(slots) else None

        return self._weighed(Total(ask, lambda: (self._zeros(*self.lse.shape),)))

    def kept(self, blocks: ChosenBlocks) -> Float[Tensor, "b h n"]:
        """What falls on some blocks of the whole sequence."""

        def ask(block: Block, row: Tensor | None) -> Answer:
            assert row is not None
            here = blocks._replace(query_places=self._places, key_places=block.places)
            return (kept_mass(block.inputs, row, here),)

        return self._weighed(Total(ask, lambda: (self._zeros(*self.lse.shape),)))

    def head_sums(
        self, blocks: KeyBlocks, queries: tuple[int, int]
    ) -> Float[Tensor, "b some_n key_blocks"]:
        """The weights of all heads together, of this rank's queries in a region, by key block."""
        first, stop = run_inside(self.ring_pass.blocks.places, queries)

        def ask(block: Block, row: Tensor | None) -> Answer | None:
            if first == stop:
                return None
            assert row is not None
            here = blocks._replace(places=block.places)
            return (head_sums(block.inputs, row, here, (first, stop)),)

        size = self.inputs.q.shape[0], stop - first, blocks.many
        return self._weighed(Total(ask, lambda: (self._zeros(*size),)))

    def chosen(
        self,
        question: str,
        queries: Int[Tensor, "q"],
        keys: Int[Tensor, "k"],
        heads: Int[Tensor, "h"],
    ) -> Float[Tensor, "b h q k"]:
        """Weights or logits of chosen pairs: those of this rank's queries, and 0 for others."""
        mine, rows = _found(self._places, queries)
        size = self.inputs.q.shape[0], len(heads), len(queries), len(keys)

        def ask(block: Block, row: Tensor | None) -> Answer | None:
            there, columns = _found(block.places, keys)
            if not len(mine) or not len(there):
                return None
            found = getattr(self.of(block, row), question)(rows, columns, heads)
            zeros = torch.zeros(size, dtype=found.dtype, device=found.device)
            wide = zeros[:, :, : len(mine)].index_copy(3, there, found)
            return (zeros.index_copy(2, mine, wide),)

        zeros = self._zeros(*size)
        if question == "weights":
            return self._weighed(Total(ask, lambda: (zeros,)))
        # A pair that is masked has a logit, -inf, and so has every pair of a hidden block.
        (found,) = self.ring_pass.ask(
            Total(ask, lambda: (zeros,), skips=False), self.inputs, self.lse
        )
        return found

    def pooled(
        self, cells: tuple[int, int], queries: tuple[int, int], keys: tuple[int, int], pool: Pool
    ) -> Float[Tensor, "b h rows columns"]:
        """Cells of a map, summed or the largest, as far as this rank's queries are in them."""
        B, H, _, _ = self.inputs.shape
        rows = _cell_runs(self.ring_pass.blocks.places, queries, cells[0])

        def ask(block: Block, row: Tensor | None) -> Answer | None:
            first, stop = run_inside(block.places, keys)
            if first == stop or not rows:
                return None
            trace = self.of(block, row)
            columns = (block.places[first:stop] - keys[0]) * cells[1] // (keys[1] - keys[0])
            found = zeros = trace.lse.detach().new_zeros(B, H, *cells)
            for cell, run in rows:
                kind: Pool = "max" if pool == "max" else "sum"
                # Key by key, since the cells of a block are no even part of those of the whole.
                each = trace.map((1, stop - first), run, (first, stop), kind)[:, :, 0]
                line = zeros[:, :, 0]
                if pool == "max":
                    line = line.scatter_reduce(2, columns.expand_as(each), each, "amax")
                else:
                    line = line.index_add(2, columns, each)
                found = found.index_add(2, zeros.new_tensor([cell]).long(), line[:, :, None])
            return (found,)

        kind = Largest if pool == "max" else Total
        return self._weighed(kind(ask, lambda: (self._zeros(B, H, *cells),)))

    def of(self, block: Block, row: Tensor | None) -> Trace:
        """A block as a trace whose weights are shares of what is seen of all keys."""
        assert row is not None
        return Trace(block.inputs, Rows(row, row, row, row), self.backend, self.second_pass)

    def detach(self) -> RingTrace:
        inputs = self.inputs.map_tensors(Tensor.detach)
        return replace(self, inputs=inputs, rows=self.rows.map(Tensor.detach))

    def _weighed(self, question: BlockQuestion) -> Tensor:
        """The answer to a question about weights."""
        found, *_ = self.ring_pass.ask(question, *self._asked())
        return found.to(self.lse.dtype)

    def _asked(self) -> tuple[AttentionInputs, Float[Tensor, "b h n"]]:
        """The call that is asked about weights, and the lse of its rows: in float64 where float32
        is not exact enough."""
        exact = self._exact
        if exact is None:
            return self.inputs, self.lse
        learned = torch.where(self.lse.isfinite(), self.lse - self.lse.detach(), 0.0)
        return widened(self.inputs), exact + learned

    @cached_property
    def _exact(self) -> Tensor | None:
        return exact_lse(self.inputs, self.lse, self.ring_pass)

    def _zeros(self, *size: int) -> Tensor:
        return self.lse.detach().new_zeros(size)

    @cached_property
    def _places(self) -> Int[Tensor, "n"]:
        return self.ring_pass.blocks.places.to(self.inputs.q.device)


def _found(places: Tensor, wanted: Tensor) -> tuple[Int[Tensor, "found"], Int[Tensor, "found"]]:
    """Which of some places are among others, which rise, and where there."""
    slot = torch.searchsorted(places, wanted)
    there = slot < len(places)
    there[there.clone()] = places[slot[there]] == wanted[there]
    which = there.nonzero().squeeze(-1)
    return which, slot[which]


def _cell_runs(
    places: Tensor, region: tuple[int, int], cells: int
) -> list[tuple[int, tuple[int, int]]]:
    """The cells of a map that have some of the places, with the run of places that each has."""
    first, stop = run_inside(places, region)
    cell = (places[first:stop] - region[0]) * cells // max(region[1] - region[0], 1)
    which, sizes = cell.unique_consecutive(return_counts=True)
    ends = (first + sizes.cumsum(0)).tolist()
    starts = [first, *ends][: len(ends)]
    return list(zip(which.tolist(), zip(starts, ends, strict=True), strict=True))


@torch.no_grad()
def _seen(x: AttentionInputs) -> Float[Tensor, "b h q"]:
    """How many keys each query sees."""
    count = x.q.new_zeros(x.shape[:3], dtype=x.compute_dtype)
    for tile, cut in cuts(x):
        count[tile.where] += (tile.logits(cut).flatten(1, 2) != -math.inf).sum(-1)
    return count
