"""A trace of attention whose weights are no shares: they may be negative, and sum to anything.

Going back from a chunk of queries, r is what each of them reads of the state before it. A chunk of
keys then gives the weights r (K · into)ᵀ T, and what is read of the state before that chunk is
r · carried - weights (K · reads); T and the last term are of the delta rule alone (see chunks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Pool, Top
from regard.backends.passes import no_autocast
from regard.errors import RegardError
from regard.linear.chunks import Decays, corrections, decays, in_chunks, kept, products
from regard.linear.recurrence import Recurrence
from regard.masks.algebra import Mask
from regard.traces import Chosen, Region, places, pooled_region
from regard.values import whole

Tile = tuple[slice, slice, Tensor]
"""Queries, keys, and the weights between them [B, H, q, k]."""
P = ParamSpec("P")
R = TypeVar("R")


def _in_full_precision(
    question: Callable[Concatenate[SignedTrace, P], R],
) -> Callable[Concatenate[SignedTrace, P], R]:
    """A question during which autocast is off: sums are made in the precision of the output."""

    @wraps(question)
    def ask(self: SignedTrace, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with no_autocast(self.inputs.q):
            return question(self, *args, **kwargs)

    return ask


class SignedTrace:
    """What one call of gated attention, or of the delta rule, did.

    A weight is what a value is multiplied with in an output: `out = weights() @ v`. Answers have
    the axes of the inputs, as those of a `Trace`; they are worked out block by block, in O(n)
    memory. Entropy, lse and logits, which speak of shares, are refused.
    """

    def __init__(self, call: Recurrence, mask: Mask | None) -> None:
        self.call, self.inputs, self.mask = call, call.inputs, mask

    @cached_property
    @_in_full_precision
    def out(self) -> Float[Tensor, "*bh n e"]:
        """The output. Differentiable."""
        return self.inputs.in_kind(self.call.run(None))

    @_in_full_precision
    def weights(
        self, queries: Chosen = None, keys: Chosen = None, heads: Chosen = None
    ) -> Float[Tensor, "*bh q k"]:
        """The exact weights of chosen queries, keys and heads; of all if none are named.
        Differentiable."""
        x = self.inputs
        if heads is not None and x.rank < 4:
            raise RegardError("heads= needs inputs that have heads", got=f"{x.rank}-D inputs")
        h = places(heads, x.shape.H, "heads", x.q.device)
        q, k = (
            places(chosen, x.shape.Q, name, x.q.device)
            for chosen, name in ((queries, "queries"), (keys, "keys"))
        )
        if not len(q):
            return x.in_kind(x.q.new_zeros(x.shape.B, len(h), 0, len(k), dtype=self.call.dtype))
        chunk, rows = self.call.chunk, []
        for one in q.split(1) if len(q) < chunk else [q]:
            chunks = (one // chunk).unique().tolist()
            found = torch.cat([self._row_chunk(c) for c in chunks], 2)
            start = torch.tensor([c * chunk for c in chunks], device=one.device)
            at = (one[:, None] // chunk == start // chunk).int().argmax(1)
            rows.append(found[:, h][:, :, at * chunk + one % chunk][..., k])
        return x.in_kind(torch.cat(rows, 2))

    @torch.no_grad()
    @_in_full_precision
    def received(self) -> Float[Tensor, "*bh k"]:
        """The sum of each key's weights, in which negative ones count against it."""
        B, H, _, K = self.inputs.shape
        total = self.inputs.q.new_zeros(B, H, K, dtype=self.call.dtype)
        for _, keys, tile in self._tiles():
            total[..., keys] += tile.sum(-2)
        return self.inputs.in_kind(total)

    @torch.no_grad()
    @_in_full_precision
    def mass(self, keys: Chosen) -> Float[Tensor, "*bh q"]:
        """The sum of each row's weights on given keys, each counted once."""
        B, H, Q, K = self.inputs.shape
        chosen = places(keys, K, "keys", self.inputs.q.device)
        counted = torch.zeros(K, device=chosen.device, dtype=self.call.dtype)
        counted[chosen] = 1
        total = counted.new_zeros(B, H, Q)
        for queries, here, tile in self._tiles():
            total[..., queries] += tile @ counted[here]
        return self.inputs.in_kind(total)

    @torch.no_grad()
    @_in_full_precision
    def top(self, n: int) -> Top:
        """Each query's n weights that are farthest from 0, with their signs, and their keys; 0 and
        -1 where a query sees fewer."""
        if whole("top: n", n) < 1:
            raise RegardError("top counts keys", got=str(n), accepted="1 or more")
        B, H, Q, K = self.inputs.shape
        n = min(n, K)
        values = self.inputs.q.new_zeros(B, H, Q, n, dtype=self.call.dtype)
        indices = torch.full_like(values, -1, dtype=torch.int64)
        for queries, keys, tile in self._tiles():
            place = torch.arange(keys.start, keys.stop, device=tile.device).expand_as(tile)
            both = torch.cat([values[:, :, queries], tile], -1)
            where = torch.cat([indices[:, :, queries], place], -1)
            best = both.abs().topk(n, dim=-1).indices
            values[:, :, queries] = both.gather(-1, best)
            indices[:, :, queries] = where.gather(-1, best)
        indices.masked_fill_(values == 0, -1)
        return Top(*(self.inputs.in_kind(t) for t in (values, indices)))

    @torch.no_grad()
    @_in_full_precision
    def map(
        self,
        cells: int | tuple[int, int],
        queries: Region = None,
        keys: Region = None,
        pool: Pool = "mean",
    ) -> Float[Tensor, "*bh rows columns"]:
        """The weights of a region, pooled into cells as `Trace.map` pools them; "max" is the
        largest weight, masked pairs being 0."""
        B, H, _, _ = self.inputs.shape
        size, rows, columns = pooled_region(self.inputs.shape, cells, queries, keys, pool)
        grid = self.inputs.q.new_zeros(B, H, *size, dtype=self.call.dtype)
        if 0 in size:
            return self.inputs.in_kind(grid)
        least = torch.full_like(grid, -torch.inf) if pool == "max" else grid
        for q, k, tile in self._tiles(masked=pool == "max"):
            q_cells, q_part = _cells(q, rows, size[0], tile.device)
            k_cells, k_part = _cells(k, columns, size[1], tile.device)
            part = tile[:, :, q_part][..., k_part]
            flat = (q_cells[:, None] * size[1] + k_cells).flatten().expand(B, H, -1)
            how = "amax" if pool == "max" else "sum"
            least.flatten(2).scatter_reduce_(2, flat, part.flatten(2), how)
        if pool == "mean":
            counts = [
                torch.bincount(
                    torch.arange(stop - start, device=grid.device) * many // (stop - start),
                    minlength=many,
                )
                for (start, stop), many in zip((rows, columns), size, strict=True)
            ]
            least = least / (counts[0][:, None] * counts[1])
        return self.inputs.in_kind(least)

    def __getattr__(self, name: str) -> object:
        if name in (
            "lse", "entropy", "max_logit", "mean_logit", "std_logit", "min_logit", "logits",
        ):  # fmt: skip
            raise RegardError(
                f"{name} needs weights that sum to 1, and these do not",
                got="gated attention or the delta rule, whose weights may be negative",
                accepted="weights(), received(), top(n), mass(keys), map(cells)",
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        B, H, Q, _ = self.inputs.shape
        rule = "gated" if self.call.beta is None else "delta rule"
        return f"SignedTrace({rule}, batch {B}, heads {H}, tokens {Q}, mask={self.mask!r})"

    def _row_chunk(self, c: int) -> Float[Tensor, "b h q k"]:
        """Whole rows of a chunk of queries."""
        tiles = [tile for _, _, tile in self._back_from(c)][::-1]
        B, H, _, K = self.inputs.shape
        done = torch.cat(tiles, -1)
        return torch.cat([done, done.new_zeros(B, H, done.shape[2], K - done.shape[3])], -1)

    def _tiles(self, *, masked: bool = False) -> Iterator[Tile]:
        """All blocks that may hold weights; with `masked`, those behind the queries too."""
        n, chunk = self.inputs.shape.Q, self.call.chunk
        for c in range(-(-n // chunk)):
            yield from self._back_from(c)
            rows = slice(c * chunk, min((c + 1) * chunk, n))
            if masked and rows.stop < n:
                B, H, _, _ = self.inputs.shape
                shape = (B, H, rows.stop - rows.start, n - rows.stop)
                yield rows, slice(rows.stop, n), self._keys[0].new_zeros(shape)

    @cached_property
    def _keys(self) -> tuple[Tensor, Decays, Tensor | None]:
        """Keys, decays and corrections in chunks."""
        call, x = self.call, self.inputs
        k, _, log_decay, beta = call.prepared(x.k, x.v, call.log_decay, call.beta, call.seen)
        runs, before = call.runs(None)
        start = None if before is None else before[:, 0, 0, 0]
        of = decays(log_decay, runs, start, call.chunk, call.dtype)
        k = in_chunks(k, call.chunk)
        solved = None if beta is None else corrections(k, in_chunks(beta, call.chunk), of)
        return k, of, solved

    def _back_from(self, c: int) -> Iterator[Tile]:
        """The weights of a chunk of queries, from its own keys back to the first."""
        call, x = self.call, self.inputs
        n, chunk = x.shape.Q, call.chunk
        rows = slice(c * chunk, min((c + 1) * chunk, n))
        many = rows.stop - rows.start
        k, of, solved = self._keys
        q = (x.q[:, :, rows].to(call.dtype) * call.scale).unflatten(1, (max(k.shape[1], 1), -1))

        def at(t: Tensor | None, i: int) -> Tensor | None:
            return None if t is None else t[:, :, i, None]

        own = None if of.within is None else of.within[:, :, c : c + 1, :many]
        mine = products(q[:, :, :, None], k[:, :, c : c + 1], own, 0)[:, :, :, 0]
        reads = None if of.reads is None else of.reads[:, :, c, None, :many]
        read = kept(q, reads)
        for i in range(c, -1, -1):
            keys = k[:, :, i, None]
            if i < c:
                mine = read @ kept(keys, at(of.into, i)).mT
            if solved is not None:
                mine = mine @ solved[:, :, i, None]
            stop = min((i + 1) * chunk, n)
            tile = mine.flatten(1, 2)[:, :, :many, : stop - i * chunk]
            yield rows, slice(i * chunk, stop), tile
            if i < c and of.carried is not None:
                read = read * of.carried[:, :, i, None].mT
            if solved is not None:
                read = read - mine @ kept(keys, at(of.reads, i))


def _cells(
    here: slice, region: tuple[int, int], many: int, device: torch.device
) -> tuple[Tensor, slice]:
    """The cells of those places of a block that are in a region, and which they are."""
    start, stop = max(here.start, region[0]), max(min(here.stop, region[1]), here.start)
    stop = max(stop, start)
    index = torch.arange(start, stop, device=device) - region[0]
    return index * many // (region[1] - region[0]), slice(start - here.start, stop - here.start)
