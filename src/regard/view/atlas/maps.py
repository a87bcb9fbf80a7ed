"""A map: the weights of one layer over one text, and what can be asked of them.

It joins the calls of the text: the run that begins it and the steps of generating that follow, each
step's queries below those before. Nothing n×n is ever held: a map answers from q, k and lse.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard import values
from regard.backends.contract import Pool
from regard.cancellation import step
from regard.errors import RegardError
from regard.files import finite_or_null
from regard.masks.algebra import Mask
from regard.masks.tiles import EMPTY, Tiles
from regard.seen import Traces, open_places
from regard.traces import Trace
from regard.view.atlas.cores import one_core
from regard.view.atlas.quantities import quantity_of

POOLS: tuple[Pool, Pool] = ("mean", "max")
NEAR = 128
"""Queries that look back at themselves are asked so many at a time."""


@dataclass(eq=False)
class Map:
    """The weights of one layer over one text."""

    name: str
    traces: Traces
    calls: range
    batch: int = 0
    queries: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    steps: Sequence[int] = ()
    """The first query of each step, where the steps are joined into one call."""
    known: Sequence[str] = ()
    """A word for each head, or none, where the model's card says what its heads do over many
    texts."""
    _heads: dict[tuple[int, int], Trace] = field(default_factory=dict)
    _choosing: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Heads, queries, keys."""
        found = [self.traces[call].inputs.shape for call in self.calls]
        return found[0].H, sum(s.Q for s in found), max(s.K for s in found)

    @cached_property
    def starts(self) -> list[int]:
        """The first query of each call, and at last the number of queries."""
        starts = [0]
        for call in self.calls:
            starts.append(starts[-1] + self.traces[call].inputs.shape.Q)
        return starts

    def head(self, head: int, call: int) -> Trace:
        """One head of one call. The few that were asked last are kept."""
        check_place(head, self.shape[0], "head")
        place = head, call
        with self._choosing:
            if place not in self._heads:
                while len(self._heads) >= max(2, len(self.calls)):
                    self._heads.pop(next(iter(self._heads)))
                self._heads[place] = _one_head(self.traces[call].detach(), self.batch, head)
            return self._heads[place]

    @torch.no_grad()
    def pooled(
        self, head: int, queries: range, keys: range, cell: int
    ) -> tuple[Float[Tensor, "rows columns"], Float[Tensor, "rows columns"]] | None:
        """Mean and largest weight of each cell of a region, where kernels pool as they go: one call
        on a card, without NaN, which they would spread over its cell. None elsewhere."""
        if len(self.calls) > 1 or self.traces[self.calls[0]].backend != "triton":
            return None
        t = self.head(head, self.calls[0])
        found = torch.empty(2, -(-len(queries) // cell), -(-len(keys) // cell))
        for rows, tall in _whole_and_rest(queries, cell):
            for columns, broad in _whole_and_rest(keys, cell):
                cells = rows.stop - rows.start, columns.stop - columns.start
                for into, pool in zip(found, POOLS, strict=True):
                    part = t.second_pass.pooled(t.inputs, t.rows.lse, cells, tall, broad, pool)
                    into[rows, columns] = part[0, 0].float().cpu()
        return None if bool(found.isnan().any()) else (found[0], found[1])

    @torch.no_grad()
    def weights(
        self,
        head: int,
        queries: Sequence[int],
        keys: range,
        quantity: str = "weight",
    ) -> Float[Tensor, "q k"]:
        """The weights of some queries and keys of a head, 0 for keys that came later.

        Or another quantity of the same pairs: see quantities.py.
        """
        step()
        H, Q, K = self.shape
        check_place(head, H, "head")
        shown = quantity_of(quantity)
        for chosen, n, what in ((queries, Q, "query"), (keys, K, "key")):
            for end in (chosen[0], chosen[-1]) if len(chosen) else ():
                check_place(end, n, what)
        found = torch.zeros(len(queries), len(keys))
        wanted = torch.tensor(queries, dtype=torch.long)
        for call, start, stop in zip(self.calls, self.starts, self.starts[1:], strict=False):
            row = ((wanted >= start) & (wanted < stop)).nonzero().squeeze(-1)
            if not len(row):
                continue
            t = self.head(head, call)
            x = t.inputs
            k = torch.arange(keys.start, min(keys.stop, x.shape.K), device=x.q.device)
            q = (wanted[row] - start).to(x.q.device)
            part = shown.of(t, t.second_pass.weights(x, t.rows.lse, q, k)[0, 0], q, k)
            if len(row) == len(wanted) and len(k) == len(keys):
                return part.float().cpu()
            found[row, : len(k)] = part.float().cpu()
        return found

    @torch.no_grad()
    def largest(self, head: int) -> Float[Tensor, "q"]:
        """The largest weight of each query, from its row statistics; 0 where it sees nothing."""
        rows = []
        for call in self.calls:
            t = self.head(head, call)
            most = (t.rows.max_logit - t.rows.lse).exp()[0, 0]
            rows.append(most.nan_to_num(0.0).float().cpu())
        return torch.cat(rows)

    @torch.no_grad()
    def top(self, head: int, count: int) -> tuple[Float[Tensor, "q n"], Int[Tensor, "q n"]]:
        """Weights and places of each query's strongest keys; 0 and 0 where it sees fewer."""
        values, keys = [], []
        for call in self.calls:
            t = self.head(head, call)
            found = t.second_pass.top(t.inputs, t.rows.lse, count)
            wide = (0, count - found[0].shape[-1])
            values.append(pad(found[0][0, 0].nan_to_num(0.0).float().cpu(), wide))
            keys.append(pad(found[1][0, 0].clamp_min(0).cpu(), wide))
        return torch.cat(values), torch.cat(keys)

    def strongest_pairs(
        self, head: int, count: int, first: int = 0
    ) -> list[tuple[int, int, float]]:
        """Queries, keys and weights of the strongest pairs, one for each query at most. Keys before
        `first` are set aside."""
        weights, keys = self.top(head, min(first + 1, self.shape[2]))
        best, at = weights.masked_fill(keys < first, 0.0).max(1)
        found = best.topk(min(count, len(best))).indices
        found = found[best[found] > 0]
        kept = keys.gather(1, at[:, None])[:, 0]
        return list(zip(found.tolist(), kept[found].tolist(), best[found].tolist(), strict=True))

    @cached_property
    def visible(self) -> Float[Tensor, "q"]:
        """How many keys each query may see."""
        rows = []
        for call in self.calls:
            x = self.traces[call].inputs
            seen = open_places(x).to(torch.float32).expand(x.shape.B, x.shape.H, x.shape.Q)
            rows.append(seen[self.batch, 0].cpu())
        return torch.cat(rows)

    def span(self, queries: range, keys: range) -> range:
        """The part of the keys outside of which all keys are masked for these queries."""
        if len(self.calls) > 1 or not queries or not keys:
            return keys
        x = self.traces[self.calls[0]].inputs
        mask: Mask | None = x.mask
        if mask is None:
            return keys
        step = max(1, -(-len(keys) // 64))
        first = torch.arange(keys.start, keys.stop, step, device=x.q.device)
        ones = torch.ones_like(first)
        tiles = Tiles(
            ones * queries[0], ones * (queries[-1] + 1), first, (first + step).clamp_max(keys.stop)
        )
        shown = (mask.judge(tiles) != EMPTY).any(0).any(0).expand(len(first)).nonzero()
        if not len(shown):
            return range(keys.start, keys.start)
        low, high = int(shown[0]), int(shown[-1])
        return range(keys.start + low * step, min(keys.start + (high + 1) * step, keys.stop))

    @one_core()
    @torch.no_grad()
    def statistics(self) -> dict[str, list[float]]:
        """Statistics of each head that need no pass over the pairs: means over its queries."""
        H, Q, K = self.shape
        sums = {name: torch.zeros(H) for name in ("entropy", "first", "self", "previous")}
        most = torch.full((H,), -torch.inf)
        for call in self.calls:
            t = self.traces[call]
            t = t[self.batch].detach() if t.inputs.shape.B > 1 else t.detach()
            x, lse = t.inputs, t.rows.lse
            sums["entropy"] += t.rows.entropy[0].nan_to_num(0.0).sum(-1).float().cpu()
            most = torch.maximum(most, t.rows.max_logit[0].amax(-1).float().cpu())
            zero = torch.zeros(1, dtype=torch.long, device=lse.device)
            sums["first"] += t.second_pass.mass(x, lse, zero)[0].nan_to_num(0.0).sum(-1).cpu()
            own, before = self._near(t)
            sums["self"] += own
            sums["previous"] += before
        found = {name: [round(v, 5) for v in (s / max(Q, 1)).tolist()] for name, s in sums.items()}
        if Q != K:  # Queries and keys are not the same text: there is no self to look at.
            del found["self"], found["previous"]
        found["max_logit"] = [round(v, 4) for v in most.nan_to_num(0.0, 0.0, 0.0).tolist()]
        return found

    @staticmethod
    def _near(t: Trace) -> tuple[Tensor, Tensor]:
        """What the queries of each head give themselves and the key before, summed."""
        x, device = t.inputs, t.inputs.q.device
        _, H, Q, K = x.shape
        own, before = torch.zeros(H), torch.zeros(H)
        offset = K - Q
        for start in range(max(0, -offset), Q, NEAR):
            step()
            stop = min(start + NEAR, Q)
            first = max(start + offset - 1, 0)
            q = torch.arange(start, stop, device=device)
            k = torch.arange(first, stop + offset, device=device)
            p = t.second_pass.weights(x, t.rows.lse, q, k)[0].nan_to_num(0.0)
            at = start + offset - first
            own += p.diagonal(at, 1, 2).sum(-1).float().cpu()
            # A query without a key before it starts the diagonal one row further down.
            before += p.diagonal(at - 1, 1, 2).sum(-1).float().cpu()
        return own, before

    def describe(self) -> dict[str, Any]:
        """The map as the front end receives it."""
        H, Q, K = self.shape
        x = self.traces[self.calls[0]].inputs
        mask = self.traces[self.calls[0]].mask
        band = x.mask.band() if x.mask is not None and len(self.calls) == 1 else None
        edge = None if band is None else finite_or_null(band)
        return {
            "name": self.name,
            "heads": H,
            "keyHeads": x.k.shape[1],
            "queries": Q,
            "keys": K,
            "band": edge,
            "mask": "none" if mask is None else repr(mask)[:200],
            "width": x.q.shape[-1],
            "backend": self.traces[self.calls[0]].backend,
            "known": list(self.known),
            "starts": list(self.steps or self.starts[:-1])[:10_000],
        }


def _one_head(t: Trace, batch: int, head: int) -> Trace:
    """A trace of one batch entry and head, without copying what it looks at."""
    one, mine = slice(batch, batch + 1), slice(head, head + 1)
    group = head // t.inputs.group
    inputs = t.inputs.select(one, mine, slice(group, group + 1))
    return replace(t, inputs=inputs, rows=t.rows.map(lambda row: row[one, mine]))


def _whole_and_rest(places: range, cell: int) -> list[tuple[slice, tuple[int, int]]]:
    """The whole cells of some places, and the one of what is left: which they are, and where."""
    whole = len(places) // cell
    middle = places.start + whole * cell
    found = [(slice(0, whole), (places.start, middle))] if whole else []
    if middle < places.stop:
        found.append((slice(whole, whole + 1), (middle, places.stop)))
    return found


def check_place(place: int, n: int, what: str) -> None:
    """Refuse a place that is not among n, and say which there are."""
    if not 0 <= values.whole(what, place) < n:
        raise RegardError(
            f"there is no such {what}", got=str(place), accepted=f"0 to {n - 1}" if n else "none"
        )
