"""All keys for everyone: each rank keeps its queries, and gets the keys and values of all ranks.

Every question about a query then has its whole answer on one rank; answers about keys are sums over
the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from regard.backends.contract import Pool
from regard.backends.questions.block_mass import head_sums, kept_mass
from regard.backends.tiled.second_pass import ChosenBlocks, KeyBlocks
from regard.calls.choice import choose
from regard.inputs import AttentionInputs
from regard.parallel.call import Call
from regard.parallel.collectives import Gather, Replicated, Scatter, Sum
from regard.parallel.layout import run_inside
from regard.parallel.methods.one_part import OnePart
from regard.parallel.placed_masks import placed_bias, placed_mask
from regard.traces import Trace

HELD = 1 << 26
"""Numbers of a map, with a row for each query, that are held at once."""


@dataclass(frozen=True)
class AllGather(OnePart):
    call: Call
    name = "all_gather"

    @property
    def places(self) -> Int[Tensor, "n"]:
        """Where the queries of this rank stand."""
        return self.call.layout.positions(self.call.ranks.rank, self.call.inputs.q.device)

    def part(self) -> AttentionInputs:
        x, layout = self.call.inputs, self.call.key_layout
        sent = layout.filled(x.k, 2), layout.filled(x.v, 2)
        # [W, B, G, N, D] to [B, G, all tokens, D]
        k, v = (
            layout.in_order(t.movedim(0, 2).flatten(2, 3), 2)
            for t in Gather.apply(self.call.ranks, *sent)  # type: ignore[no-untyped-call]
        )
        return self._with(k, v)

    def check(self, backend: str | None, *, statistics: bool) -> None:
        if backend is None:
            return
        x, K = self.call.inputs, self.call.shape.K
        # A backend is shown the gathered keys without their values: shapes, types and device.
        k, v = (
            t.new_empty(*t.shape[:2], K, t.shape[3]).requires_grad_(t.requires_grad)
            for t in (x.k, x.v)
        )
        choose(self._with(k, v), backend, statistics=statistics)

    def _with(self, k: Tensor, v: Tensor) -> AttentionInputs:
        """This rank's queries with all keys and values."""
        x = self.call.inputs
        runs = self.call.layout.runs[self.call.ranks.rank]
        start = runs[0][0] if len(runs) == 1 else None
        return replace(
            x,
            k=k,
            v=v,
            mask=placed_mask(x.mask, self.places, self.call.layout.length, start),
            bias=placed_bias(x.bias, self.places, start),
        )

    def received(self, part: Trace) -> Tensor:
        layout, ranks = self.call.key_layout, self.call.ranks
        parts = layout.in_shards(part.received(), 2)
        parts = parts.unflatten(2, (ranks.size, layout.longest)).movedim(2, 0)
        (found,) = Scatter.apply(ranks, parts)  # type: ignore[no-untyped-call]
        return found[:, :, : layout.lengths[ranks.rank]]  # type: ignore[no-any-return]

    def chosen(
        self,
        part: Trace,
        question: str,
        queries: Int[Tensor, "q"],
        keys: Int[Tensor, "k"],
        heads: Int[Tensor, "h"],
    ) -> Tensor:
        slot = torch.searchsorted(self.places, queries)
        there = slot < len(self.places)
        there[there.clone()] = self.places[slot[there]] == queries[there]
        mine = there.nonzero().squeeze(-1)
        size = len(part), len(heads), len(queries), len(keys)
        every = part.lse.detach().new_zeros(size)
        if len(mine):
            found = getattr(part, question)(slot[mine], keys, heads)
            every = every.index_copy(2, mine, found)
        whole: Tensor = Sum.apply(self.call.ranks, every)  # type: ignore[no-untyped-call]
        return whole

    def pooled(
        self,
        part: Trace,
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Tensor:
        B, H = self.call.shape[:2]
        # Asked of the CPU, which need not wait for the device.
        first, stop = run_inside(self.call.layout.positions(self.call.ranks.rank), queries)
        rows = (self.places[first:stop] - queries[0]) * cells[0] // (queries[1] - queries[0])
        found = part.lse.detach().new_zeros(B, H, *cells)
        step = max(1, HELD // max(B * H * cells[1], 1))
        for start in range(first, stop, step):
            some = start, min(start + step, stop)
            # Cells of a region are those of the whole; of some of its queries, one by one.
            columns = (some[1] - some[0], cells[1])
            each = part.map(columns, some, keys, "max" if pool == "max" else "sum")
            where = rows[some[0] - first : some[1] - first]
            if pool == "max":
                at = where[:, None].expand_as(each)
                found = found.scatter_reduce(2, at, each, "amax")
            else:
                found = found.index_add(2, where, each)
        if pool == "max":
            every: Tensor = Replicated.apply(self.call.ranks, found)  # type: ignore[no-untyped-call]
            return every.amax(0)
        whole: Tensor = Sum.apply(self.call.ranks, found)  # type: ignore[no-untyped-call]
        return whole if pool == "sum" else mean_of_cells(whole, queries, keys)

    def kept(self, part: Trace, blocks: ChosenBlocks) -> Tensor:
        return kept_mass(part.inputs, part.lse, blocks._replace(query_places=self.places))

    def head_sums(self, part: Trace, blocks: KeyBlocks, queries: tuple[int, int]) -> Tensor:
        own = run_inside(self.call.layout.positions(self.call.ranks.rank), queries)
        return head_sums(part.inputs, part.lse, blocks, own)


def mean_of_cells(whole: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Sums of cells over how many pairs each has."""
    down = _sizes(whole.shape[2], queries[1] - queries[0], whole)
    return whole / (down[:, None] * _sizes(whole.shape[3], keys[1] - keys[0], whole))


def _sizes(cells: int, places: int, like: Tensor) -> Tensor:
    """How many places each cell has."""
    edges = -(-torch.arange(cells + 1, device=like.device) * places // cells)
    return edges.diff().to(like.dtype)
