"""What the rows of heads saw, added up: a few numbers per head, whatever the length."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.seen.looks import Looks, looked_at
from regard.traces import Trace

MANY = 2**27
"""So many bytes of calls wait at most to be added up together."""
SOME = 2**24
"""So many wait on when a run is over: the steps of generating are added up together too."""
MOST = 4096
"""And so many calls."""
ROUNDINGS = 4
"""By so many units in its last place a logit may differ from one pass to another."""


@dataclass(frozen=True)
class Statistics:
    """What the rows of each head saw, added up over batch, queries and calls: all [H], on the
    device they were made on."""

    rows: Float[Tensor, "h"]
    empty: Float[Tensor, "h"]
    """Rows that may see nothing."""
    broken: Float[Tensor, "h"]
    """Rows whose logits hold NaN or infinity."""
    max_logit: Float[Tensor, "h"]
    entropy: Float[Tensor, "h"]
    """Summed over rows that see something."""
    first: Float[Tensor, "h"]
    """What falls on the first key, summed over rows that see something."""

    @staticmethod
    def of(trace: Trace) -> Statistics:
        """From one call, without waiting for the device."""
        return Sums.of([Looks.of(trace)], 1).at(0)

    def __add__(self, other: Statistics) -> Statistics:
        sums = ("rows", "empty", "broken", "entropy", "first")
        added = torch._foreach_add(
            [getattr(self, name) for name in sums], [getattr(other, name) for name in sums]
        )
        return Statistics(
            **dict(zip(sums, added, strict=True)),
            max_logit=torch.maximum(self.max_logit, other.max_logit),
        )

    @property
    def sound(self) -> Float[Tensor, "h"]:
        """Rows that see something, and nothing broken; at least 1, to divide by."""
        return (self.rows - self.empty - self.broken).clamp_min(1)


class Sums(NamedTuple):
    """Statistics of several layers in few tensors: on a card an operation takes longer to start
    than to run."""

    rows: int
    """Of each head of each layer."""
    counts: Float[Tensor, "4 layers h"]
    """Rows that see nothing or something broken, and those of them that see nothing; entropies, and
    shares of the first key, of the others."""
    largest: Float[Tensor, "layers h"]

    @staticmethod
    @torch.no_grad()
    def of(calls: Sequence[Looks], layers: int) -> Sums:
        """From calls of one kind, equally many of each layer, those of a layer together."""
        looked, first = looked_at(calls)
        looked = looked.unflatten(1, (layers, -1))
        max_logit, _, lse = looked.unbind()
        size = max_logit.abs()
        below = first.view_as(max_logit).sub_(max_logit)
        share(below, max_logit, size, lse)
        ill = ~(size < math.inf)
        over = (-4, -3, -1)
        # Entropies and shares of the first key, which stand side by side.
        sums = looked[1:].masked_fill_(ill, 0.0).sum(over)
        kinds = torch.stack([ill, max_logit == -math.inf]).sum(over, dtype=looked.dtype)
        many, B, H, Q = max_logit.shape[1:]
        if many * B * Q:
            largest = max_logit.masked_fill_(ill, -math.inf).amax(over)
        else:
            largest = looked.new_full((layers, H), -math.inf)
        return Sums(many * B * Q, torch.cat([kinds, sums]), largest)

    def plus(self, other: Sums) -> Sums:
        """With more calls of the same layers."""
        return Sums(
            self.rows + other.rows,
            self.counts + other.counts,
            torch.maximum(self.largest, other.largest),
        )

    def at(self, place: int) -> Statistics:
        """Of one of the layers."""
        ill, empty, entropy, first = self.counts[:, place]
        rows = torch.full_like(ill, self.rows)
        return Statistics(rows, empty, ill - empty, self.largest[place], entropy, first)


def share(below: Tensor, max_logit: Tensor, size: Tensor, lse: Tensor) -> None:
    """The weight of a key, of which the logit was computed once more, in the place of `lse`. It is
    given by how far it is below the largest, of which `size` is the magnitude.

    Whoever trains must not wait until the device says how large logits are, to have large ones
    computed in float64 as other questions do. They round otherwise than in the forward pass; so a
    logit that is the largest as far as its precision tells is taken to be the largest of that pass,
    which none exceeds."""
    rounding = ROUNDINGS * torch.finfo(lse.dtype).eps
    below = below.masked_fill_(torch.add(below, size, alpha=rounding) >= 0, 0.0)
    torch.sub(max_logit, lse, out=lse).add_(below).exp_()


class Shared:
    """What was added up of several layers together, and goes on being."""

    def __init__(self, whose: tuple[Adds, ...], sums: Sums) -> None:
        self.whose, self.sums = whose, sums


@runtime_checkable
class Adds(Protocol):
    """A layer whose statistics are added up with those of others."""

    shared: list[tuple[Shared, int]]
    """With whom, and which of them it is."""


_changing = threading.RLock()
"""Whoever reads may do so in another thread than the one that runs. One for all, since what was
seen can be copied and a lock cannot."""


class Waiting:
    """Calls whose rows are not added up yet."""

    def __init__(self) -> None:
        self._calls: list[tuple[Adds, Looks]] = []
        self._held = 0
        self._tied = False
        """Whether what waits is tied to a graph of autograd, and would keep it alive."""

    def put(self, whose: Adds, trace: Trace, *, lasts: bool = False) -> None:
        """A call. Of a short one only its rows and what the first key needs wait: copies, unless
        its tensors stay what they are."""
        looks = Looks.of(trace, waits=not lasts)
        x = trace.inputs
        lse = looks.table if looks.rows is None else looks.rows.lse
        assert lse is not None
        tied = x.q.requires_grad or x.k.requires_grad or lse.requires_grad
        with _changing:
            self._calls.append((whose, looks))
            self._held += looks.held
            self._tied |= tied
        if self._held >= MANY:
            self.settle()

    def rest(self) -> None:
        """A run is over. Little may wait for the next."""
        if self._tied or self._held >= SOME or len(self._calls) >= MOST:
            self.settle()

    def drop(self) -> None:
        """Forget what waits."""
        with _changing:
            self._calls, self._held, self._tied = [], 0, False

    def settle(self) -> None:
        """Add up what waits, calls of one kind together."""
        # An interrupt in leaving `no_grad` would leave autograd off.
        autograd = torch.is_grad_enabled()
        try:
            self._settle()
        finally:
            torch._C._set_grad_enabled(autograd)

    def _settle(self) -> None:
        with _changing:
            waited, self._calls, self._held, self._tied = self._calls, [], 0, False
            kinds: defaultdict[object, dict[int, tuple[Adds, list[Looks]]]] = defaultdict(dict)
            for whose, looks in waited:
                kinds[looks.kind].setdefault(id(whose), (whose, []))[1].append(looks)
            for layers in kinds.values():
                # Most often each layer was called once.
                equally = defaultdict[int, list[tuple[Adds, list[Looks]]]](list)
                for of_layer in layers.values():
                    equally[len(of_layer[1])].append(of_layer)
                for some in equally.values():
                    looked = [looks for _, several in some for looks in several]
                    _add(tuple(whose for whose, _ in some), Sums.of(looked, len(some)))


def _add(whose: tuple[Adds, ...], found: Sums) -> None:
    for shared, _ in whose[0].shared:
        if shared.whose == whose:
            shared.sums = shared.sums.plus(found)
            return
    shared = Shared(whose, found)
    for place, layer in enumerate(whose):
        layer.shared.append((shared, place))
