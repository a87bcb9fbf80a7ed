"""What one call across ranks did."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Pool, Rows, Top
from regard.backends.questions.block_mass import (
    Blocks,
    Recall,
    all_blocks,
    chosen_blocks,
    key_blocks,
    mean_recall,
    recalled,
    shares,
)
from regard.masks.algebra import Mask
from regard.parallel.call import Call, Method, Part
from regard.parallel.collectives import Sum, gathered
from regard.parallel.handshake import Facts, agree, numbers_of, refused_together
from regard.parallel.layout import Layout
from regard.parallel.own_rows import OwnRows
from regard.traces import Chosen, Region, Trace, places, pooled_region, region_of

ROWS = (
    "out", "lse", "max_logit", "entropy", "mean_logit", "std_logit", "min_logit", "top", "mass",
    "recall().rows",
)  # fmt: skip
PLACEMENTS = dict.fromkeys(ROWS, "Shard(2) by layout") | {
    "indexer_target": "Shard(1) by layout",
    "recall().mean": "Replicate()",
    "received": "Shard(2) by key_layout",
    "weights": "Replicate()",
    "logits": "Replicate()",
    "map": "Replicate()",
}


@dataclass(frozen=True, eq=False, repr=False)
class ParallelTrace(OwnRows):
    """A trace whose tokens are sharded over ranks, with the names of a `Trace`.

    Answers about queries (`out`, `lse`, `entropy`, the logits' numbers, `top`, `mass`, `recall`,
    `indexer_target`) are those of this rank's queries; `received` is about this rank's keys;
    `weights`, `logits` and `map` are about what was asked for, alike on every rank. All are plain
    tensors, or DTensors if q, k and v were. Places in questions and answers are those of the whole
    sequence.

    `out`, `lse`, `max_logit` and `entropy` are at hand. The others are questions that all ranks
    must ask, alike and in the same order.
    """

    call: Call
    method: Method[Any]
    part: Part
    """What this rank worked on: a plain trace of some heads or of some queries; or, where keys go
    round, its queries."""
    rows: Rows
    mask: Mask | None = None
    """The mask as it was given, without lengths."""

    placements = PLACEMENTS
    """What each answer is across ranks, in the words of DTensor. Its `Shard` cuts an axis into
    equal runs, in order, which tokens in zigzag are not: answers are DTensors where q, k and v
    are, which have that order."""

    @property
    def layout(self) -> Layout:
        return self.call.layout

    @property
    def key_layout(self) -> Layout:
        return self.call.key_layout

    @property
    def backend(self) -> str:
        return self.part.backend

    @property
    def mean_logit(self) -> Float[Tensor, "b h n"]:
        """The plain mean of each row's allowed logits. Goes over all pairs; all ranks must ask.
        Differentiable."""
        self._agree("mean_logit")
        (found,) = self.method.of_rows(self.part.mean_logit)
        return self._of_queries(found)

    @property
    def std_logit(self) -> Float[Tensor, "b h n"]:
        """The standard deviation of each row's allowed logits, as `Trace.std_logit` gives it. Goes
        over all pairs; all ranks must ask. No gradient."""
        self._agree("std_logit")
        (found,) = self.method.of_rows(self.part.std_logit)
        return self._of_queries(found)

    @property
    def min_logit(self) -> Float[Tensor, "b h n"]:
        """The least logit of each row. Goes over all pairs; all ranks must ask. No gradient."""
        self._agree("min_logit")
        (found,) = self.method.of_rows(self.part.min_logit)
        return self._of_queries(found)

    def received(self) -> Float[Tensor, "b h n"]:
        """What each key of this rank got from the queries of all ranks. Differentiable."""
        self._agree("received()")
        return self._of_keys(self.method.received(self.part))

    def top(self, n: int) -> Top:
        """Weights and key indices of each query's n strongest keys, as `Trace.top` gives them."""
        self._agree(f"top({n})")
        return Top(*map(self._of_queries, self.method.of_rows(*self.part.top(n))))

    def mass(self, keys: Chosen) -> Float[Tensor, "b h n"]:
        """The share of each row that falls on given keys, each counted once. Differentiable."""
        with self._checking():
            at = places(keys, self.call.shape.K, "keys", self._device, once=True)
        self._agree("mass", at)
        (found,) = self.method.of_rows(self.part.mass(at))
        return self._of_queries(found)

    def weights(
        self, queries: Chosen = None, keys: Chosen = None, heads: Chosen = None
    ) -> Float[Tensor, "b h q k"]:
        """The exact weights of chosen queries, keys and heads, on every rank. Differentiable; what
        every rank has is counted once."""
        return self._chosen("weights", queries, keys, heads)

    def logits(
        self, queries: Chosen = None, keys: Chosen = None, heads: Chosen = None
    ) -> Float[Tensor, "b h q k"]:
        """The scores before softmax, on every rank. Differentiable; counted once."""
        return self._chosen("logits", queries, keys, heads)

    def map(
        self,
        cells: int | tuple[int, int],
        queries: Region = None,
        keys: Region = None,
        pool: Pool = "mean",
    ) -> Float[Tensor, "b h rows columns"]:
        """The weights of a region, pooled into cells, on every rank, as `Trace.map` gives them.
        Differentiable; counted once."""
        B, H, _, _ = self.call.shape
        with self._checking():
            size, rows, columns = pooled_region(self.call.shape, cells, queries, keys, pool)
        self._agree(f"map({size}, {rows}, {columns}, {pool})")
        if 0 in size:
            return self._alike(self.rows.lse.detach().new_zeros(B, H, *size))
        return self._alike(self.method.pooled(self.part, size, rows, columns, pool))

    def recall(self, blocks: Blocks, size: int | tuple[int, int] = 64) -> Recall:
        """How much of this rank's rows a choice of key blocks keeps, and the mean over the rows of
        all ranks. `blocks` are those of the whole sequence, as `Trace.recall` takes them.
        Differentiable; the mean, which every rank has, is counted once."""
        with self._checking():
            chosen = chosen_blocks(self.call.inputs, blocks, size, self.call.shape)
        sizes = chosen.queries, chosen.keys
        self._agree(f"recall of blocks {sizes}", contents={"blocks": numbers_of(chosen.kept)})
        kept = self.method.kept(self.part, chosen)
        on_keys = None
        if self.call.inputs.sink is not None:
            on_keys = self.method.kept(self.part, all_blocks(chosen))
        rows, seen = recalled(kept, self.rows.lse, on_keys)
        own = torch.stack([(rows * seen).sum(-1), seen.sum(-1).to(rows.dtype)])
        total, many = Sum.apply(self.call.ranks, own)  # type: ignore[no-untyped-call]
        return Recall(self._of_queries(rows), self._alike(mean_recall(total, many)))

    def indexer_target(
        self, size: int = 64, queries: Region = None
    ) -> Float[Tensor, "b some_n key_blocks"]:
        """The weights summed over heads and blocks of keys, as shares of 1, as
        `Trace.indexer_target` gives them: of this rank's queries, or those in a region.
        Differentiable."""
        with self._checking():
            region = region_of(queries, self.call.shape.Q, "queries", "indexer_target")
            blocks = key_blocks(size, self.call.shape.K)
        self._agree(f"indexer_target({size}, {region})")
        return shares(self.method.head_sums(self.part, blocks, region))

    @torch.no_grad()
    def full(self) -> Trace:
        """A plain trace of the whole call, on every rank, cut from autograd: q, k, v and what each
        row saw, gathered. All ranks must ask."""
        self._agree("full()")
        x, ranks = self.call.inputs, self.call.ranks

        every = [(x.q, self.layout), (x.k, self.key_layout), (x.v, self.key_layout)]
        every += [(t, self.layout) for t in self.rows]
        sent = gathered(ranks, [layout.filled(t, 2) for t, layout in every])
        q, k, v, *rows = (
            layout.in_order(parts.movedim(0, 2).flatten(2, 3), 2)
            for parts, (_, layout) in zip(sent, every, strict=True)
        )
        inputs = replace(x, q=q, k=k, v=v).map_tensors(Tensor.detach)
        return Trace(inputs, Rows(*rows), self.part.backend, self.part.second_pass, self.mask)

    def detach(self) -> ParallelTrace:
        """The same trace, cut from autograd."""
        call = replace(self.call, inputs=self.call.inputs.map_tensors(Tensor.detach))
        rows = self.rows.map(Tensor.detach)
        return replace(self, call=call, part=self.part.detach(), rows=rows)

    def _chosen(self, question: str, queries: Chosen, keys: Chosen, heads: Chosen) -> Tensor:
        _, H, Q, K = self.call.shape
        with self._checking():
            q = places(queries, Q, "queries", self._device)
            k = places(keys, K, "keys", self._device)
            h = places(heads, H, "heads", self._device)
        self._agree(question, q, k, h)
        return self._alike(self.method.chosen(self.part, question, q, k, h))

    def _of_queries(self, t: Tensor) -> Tensor:
        """An answer about this rank's queries, as it is given away."""
        return t

    def _of_keys(self, t: Tensor) -> Tensor:
        """The same about its keys."""
        return t

    def _alike(self, t: Tensor) -> Tensor:
        """The same that every rank has."""
        return t

    def _checking(self) -> AbstractContextManager[None]:
        """An error in a question on one rank is raised on all."""
        return refused_together(self.call.ranks, self._device)

    def _agree(self, question: str, *at: Tensor, contents: Facts | None = None) -> None:
        """All ranks ask the same."""
        named = [
            str(t.tolist()) if len(t) < 64 else f"{len(t)} places {numbers_of(t)[:16]}" for t in at
        ]
        asked = ", ".join([question, *named])
        learns = torch.is_grad_enabled()
        told = {"question": asked, "autograd": str(learns)}
        agree(self.call.ranks, self._device, told | (contents or {}))

    @cached_property
    def _device(self) -> torch.device:
        return self.call.inputs.q.device

    def __repr__(self) -> str:
        B, H, Q, K = self.call.shape
        G = self.call.inputs.k.shape[1]
        heads = f"heads {H}" if G == H else f"heads {H} over {G}"
        dtype = str(self.call.inputs.q.dtype).removeprefix("torch.")
        mask = "" if self.mask is None else f", mask={self.mask!r}"
        return (
            f"ParallelTrace({self.call.ranks}: batch {B}, {heads}, {self.rows.lse.shape[2]} of {Q} "
            f"queries, {K} keys, {dtype} on {self._device}{mask}, {self.layout!r}, by "
            f"{self.method.name} and {self.backend})"
        )
