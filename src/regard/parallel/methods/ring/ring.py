"""Keys go round: each rank keeps its queries, and sees the keys and values of one rank at a time.

No rank holds the keys of all. What its queries saw of each block is merged by log-sum-exp; every
question goes round again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Int
from torch import Tensor

from regard.backends.contract import Backend, Pool, Rows
from regard.backends.tiled.second_pass import ChosenBlocks, KeyBlocks
from regard.calls.choice import choose
from regard.parallel.call import Call
from regard.parallel.collectives import Replicated, Sum
from regard.parallel.merge import merge, rows_of_sink
from regard.parallel.methods.all_gather import mean_of_cells
from regard.parallel.methods.ring.block_questions import OfRows
from regard.parallel.methods.ring.blocks import Blocks
from regard.parallel.methods.ring.ring_pass import RingPass
from regard.parallel.methods.ring.ring_trace import RingTrace


@dataclass(frozen=True)
class Ring:
    call: Call
    name = "ring"

    @cached_property
    def ring_pass(self) -> RingPass:
        call = self.call
        return RingPass(Blocks(call.ranks, call.layout, call.key_layout), call.inputs.mask)

    def check(self, backend: str | None, *, statistics: bool) -> None:
        self._chosen(backend)

    def attend(self, backend: str | None) -> Tensor:
        return self._rows(backend).out

    def observe(self, backend: str | None) -> RingTrace:
        chosen = self._chosen(backend)
        rows = self._rows(backend)
        return RingTrace(self.call.inputs, rows, self.ring_pass, chosen.name, chosen.questions())

    def of_rows(self, *answers: Tensor) -> tuple[Tensor, ...]:
        return answers

    def received(self, part: RingTrace) -> Tensor:
        return part.received()

    def chosen(
        self,
        part: RingTrace,
        question: str,
        queries: Int[Tensor, "q"],
        keys: Int[Tensor, "k"],
        heads: Int[Tensor, "h"],
    ) -> Tensor:
        mine = part.chosen(question, queries, keys, heads)
        whole: Tensor = Sum.apply(self.call.ranks, mine)  # type: ignore[no-untyped-call]
        return whole

    def pooled(
        self,
        part: RingTrace,
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Tensor:
        mine = part.pooled(cells, queries, keys, pool)
        if pool == "max":
            every: Tensor = Replicated.apply(self.call.ranks, mine)  # type: ignore[no-untyped-call]
            return every.amax(0)
        whole: Tensor = Sum.apply(self.call.ranks, mine)  # type: ignore[no-untyped-call]
        return whole if pool == "sum" else mean_of_cells(whole, queries, keys)

    def kept(self, part: RingTrace, blocks: ChosenBlocks) -> Tensor:
        return part.kept(blocks)

    def head_sums(self, part: RingTrace, blocks: KeyBlocks, queries: tuple[int, int]) -> Tensor:
        return part.head_sums(blocks, queries)

    def _chosen(self, backend: str | None) -> Backend:
        """What runs the block of this rank's own keys."""
        x = self.call.inputs
        own = self.ring_pass.blocks.block(x, self.call.ranks.rank, x.k, x.v)
        return choose(own.inputs, backend, statistics=True)

    def _rows(self, backend: str | None) -> Rows:
        x = self.call.inputs
        rows = Rows(*self.ring_pass.ask(OfRows(backend), x, None))
        return rows if x.sink is None else merge(rows, rows_of_sink(x.sink, rows))
