"""Heads instead of tokens: each rank trades its tokens of all heads for all tokens of its heads.

Every question about a head then has its whole answer on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from regard.backends.contract import Pool
from regard.backends.questions.block_mass import head_sums, kept_mass
from regard.backends.tiled.second_pass import ChosenBlocks, KeyBlocks
from regard.inputs import AttentionInputs
from regard.parallel.call import Call
from regard.parallel.collectives import Exchange, Replicated, Scatter, Sum, exchanged
from regard.parallel.layout import Layout, run_inside
from regard.parallel.methods.one_part import OnePart
from regard.traces import Trace


def refuses(heads: int, key_heads: int, ranks: int) -> list[str]:
    """Why heads cannot be dealt out."""
    if heads % ranks:
        return [f"{heads} heads cannot be dealt out evenly to {ranks} ranks"]
    each, group = heads // ranks, heads // max(key_heads, 1)
    if key_heads % ranks and group % each:
        return [
            f"the {each} heads of a rank would share {key_heads} key heads unevenly: groups of "
            f"{group} lie across ranks"
        ]
    return []


@dataclass(frozen=True)
class Ulysses(OnePart):
    call: Call
    name = "ulysses"

    @property
    def heads(self) -> slice:
        """The heads of this rank."""
        n, rank = self._each, self.call.ranks.rank
        return slice(rank * n, (rank + 1) * n)

    @property
    def _each(self) -> int:
        return self.call.inputs.shape.H // self.call.ranks.size

    def part(self) -> AttentionInputs:
        x, call = self.call.inputs, self.call
        k, v = self._dealt(x.k), self._dealt(x.v)
        sent = [
            _to_send(t, layout, call.ranks.size)
            for t, layout in ((x.q, call.layout), (k, call.key_layout), (v, call.key_layout))
        ]
        got = Exchange.apply(call.ranks, *sent)  # type: ignore[no-untyped-call]
        layouts = call.layout, call.key_layout, call.key_layout
        q, k, v = (_whole(t, layout) for t, layout in zip(got, layouts, strict=True))
        every, heads = slice(None), self.heads
        return replace(
            x,
            q=q,
            k=k,
            v=v,
            comparison=x.comparison.select(heads),
            mask=None if x.mask is None else x.mask.select(every, heads),
            bias=None if x.bias is None else x.bias.select(every, heads),
            sink=None if x.sink is None else x.sink[heads],
        )

    def of_rows(self, *answers: Tensor) -> tuple[Tensor, ...]:
        return self._back(self.call.layout, *answers)

    def received(self, part: Trace) -> Tensor:
        (found,) = self._back(self.call.key_layout, part.received())
        return found

    def chosen(
        self,
        part: Trace,
        question: str,
        queries: Int[Tensor, "q"],
        keys: Int[Tensor, "k"],
        heads: Int[Tensor, "h"],
    ) -> Tensor:
        mine = ((heads >= self.heads.start) & (heads < self.heads.stop)).nonzero().squeeze(-1)
        size = len(part), len(heads), len(queries), len(keys)
        every = part.lse.detach().new_zeros(size)
        if len(mine):
            found = getattr(part, question)(queries, keys, heads[mine] - self.heads.start)
            every = every.index_copy(1, mine, found)
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
        found = part.map(cells, queries, keys, pool)
        every: Tensor = Replicated.apply(self.call.ranks, found)  # type: ignore[no-untyped-call]
        return every.movedim(0, 1).flatten(1, 2)

    def kept(self, part: Trace, blocks: ChosenBlocks) -> Tensor:
        mine = blocks._replace(kept=blocks.kept[:, self.heads])
        (found,) = self.of_rows(kept_mass(part.inputs, part.lse, mine))
        return found

    def head_sums(self, part: Trace, blocks: KeyBlocks, queries: tuple[int, int]) -> Tensor:
        found = head_sums(part.inputs, part.lse, blocks, queries)
        layout, ranks = self.call.layout, self.call.ranks
        places = [layout.positions(rank) for rank in range(ranks.size)]
        runs = [run_inside(each, queries) for each in places]
        longest = max(stop - first for first, stop in runs)
        sent = []
        for each, (first, stop) in zip(places, runs, strict=True):
            rows = found[:, (each[first:stop] - queries[0]).to(found.device)]
            sent.append(torch.nn.functional.pad(rows, (0, 0, 0, longest - (stop - first))))
        (own,) = Scatter.apply(ranks, torch.stack(sent))  # type: ignore[no-untyped-call]
        first, stop = runs[ranks.rank]
        return own[:, : stop - first]  # type: ignore[no-any-return]

    def _back(self, layout: Layout, *answers: Tensor) -> tuple[Tensor, ...]:
        """Answers [B, heads of this rank, all tokens, ...] as [B, all heads, own tokens, ...]."""
        W, n = self.call.ranks.size, layout.lengths[self.call.ranks.rank]
        # [B, h, W · N, ...] to [W, B, h, N, ...]
        sent = [
            layout.in_shards(t, 2).unflatten(2, (W, layout.longest)).movedim(2, 0) for t in answers
        ]
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in sent)
        got = Exchange.apply(self.call.ranks, *sent) if learns else exchanged(self.call.ranks, sent)  # type: ignore[no-untyped-call]
        return tuple(t.movedim(0, 1).flatten(1, 2)[:, :, :n] for t in got)

    def _dealt(self, k: Tensor) -> Tensor:
        """Keys or values with the heads that each rank needs side by side; those of a group that
        several ranks share, once for each."""
        W, G = self.call.ranks.size, k.shape[1]
        if not G % W:
            return k
        group = self.call.inputs.shape.H // G
        return k[:, [w * self._each // group for w in range(W)]]


def _to_send(t: Tensor, layout: Layout, ranks: int) -> Tensor:
    """[B, H, n, D] as [W, B, H / W, N, D]."""
    parts: Tensor = layout.filled(t, 2).unflatten(1, (ranks, -1))
    return parts.movedim(1, 0)


def _whole(t: Tensor, layout: Layout) -> Tensor:
    """[W, B, h, N, D] of all ranks as [B, h, all tokens, D]."""
    return layout.in_order(t.movedim(0, 2).flatten(2, 3), 2)
