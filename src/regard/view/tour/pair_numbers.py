"""Every number between a query and a key, and the weight that comes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.scores.comparison import Dot
from regard.traces import Trace
from regard.view.atlas.maps import Map, check_place

Vector = Float[Tensor, "d"]
Row = Float[Tensor, "k"]


@dataclass(frozen=True, eq=False)
class PairNumbers:
    """How the weight of a pair comes about, in float64 from what the trace holds.

    What a trace does not hold is None: q and k where it was made of bare weights, the products
    where pairs are compared by something else than a dot product, values where none were kept.
    """

    query: int
    key: int
    q: Vector | None
    k: Vector | None
    products: Row | None
    """q·k of this query with each key."""
    scale: float
    """By what q·k is multiplied: 1 / √d in most models."""
    changed: str
    """What else the model does to a logit, in words; empty if nothing."""
    logits: Row
    """Of this query with each key, -inf where a pair is masked."""
    lse: float
    weights: Row
    values: Float[Tensor, "k e"] | None
    has_sink: bool

    @property
    def seen(self) -> int:
        """How many keys the query may see."""
        return int((self.logits > -math.inf).sum())

    @property
    def out(self) -> Vector | None:
        """What the head writes at the query: all values, each times its weight."""
        return None if self.values is None else self.weights @ self.values


@torch.no_grad()
def pair_numbers(of: Map, head: int, query: int, key: int) -> PairNumbers:
    """The numbers of one pair of a head.

    >>> import regard, torch
    >>> from regard.view.atlas import Atlas
    >>> q = torch.tensor([[1.0, 0, 1, 0]])
    >>> k = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0]])
    >>> found = pair_numbers(Atlas.of(regard.trace(q, k, k))[0], 0, 0, 2)
    >>> float(found.products[2]), float(found.logits[2]), round(float(found.weights[2]), 4)
    (2.0, 1.0, 0.4519)
    """
    H, Q, K = of.shape
    for place, n, what in ((head, H, "head"), (query, Q, "query"), (key, K, "key")):
        check_place(place, n, what)
    t, row = _call(of, head, query)
    x = t.inputs
    at = torch.tensor([row], device=x.q.device)
    every = torch.arange(x.shape.K, device=x.q.device)
    logits = t.second_pass.logits(x, at, every)[0, 0, 0]
    weights = t.second_pass.weights(x, t.rows.lse, at, every)[0, 0, 0].nan_to_num(0.0)
    q, k, v = x.q[0, 0, row], x.k[0, 0], x.v[0, 0]
    bare = not v.shape[-1] and not bool(q.any()) and not bool(k.any())
    dot = isinstance(x.comparison, Dot) and not bare
    return PairNumbers(
        query,
        key,
        None if bare else _plain(q),
        None if bare else _plain(k[min(key, len(k) - 1)]),
        _filled(_plain(k) @ _plain(q), K, 0.0) if dot else None,
        float(getattr(x.comparison, "scale", 1.0)),
        _changed(t, bare),
        _filled(_plain(logits), K, -math.inf),
        float(t.rows.lse[0, 0, row]),
        _filled(_plain(weights), K, 0.0),
        _plain(torch.cat([v, v.new_zeros(K - len(v), v.shape[-1])])) if v.shape[-1] else None,
        x.sink is not None,
    )


def _call(of: Map, head: int, query: int) -> tuple[Trace, int]:
    """The trace of the call that a query is in, and its row there."""
    for call, start, stop in zip(of.calls, of.starts, of.starts[1:], strict=False):
        if query < stop:
            return of.head(head, call), query - start
    raise AssertionError("every query is in a call")


def _plain(t: Tensor) -> Tensor:
    return t.detach().double().cpu()


def _filled(row: Row, n: int, value: float) -> Row:
    """A row of all n keys: those that came after its call stand at the end."""
    return torch.cat([row, row.new_full((n - len(row),), value)])


def _changed(t: Trace, bare: bool) -> str:
    if bare:
        return ""
    x = t.inputs
    capped = "" if x.softcap is None else f"soft-capped at {x.softcap:g}"
    biased = "" if x.bias is None else "a bias for its place is added"
    return " and ".join(filter(None, (capped, biased)))
