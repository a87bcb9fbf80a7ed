"""What the rows of heads saw, added up: a few numbers per head, whatever the length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.traces import Trace

MANY = 2**20
"""So many rows are added up at once: 16 MB of them wait for it at most."""

ROUNDINGS = 4
"""By so many units in its last place a logit may differ from one pass to another."""


class Looks(NamedTuple):
    """What each row of a call saw."""

    max_logit: Float[Tensor, "b h q"]
    entropy: Float[Tensor, "b h q"]
    lse: Float[Tensor, "b h q"]
    first: Float[Tensor, "b h q"]
    """The logit of the first key."""

    @staticmethod
    @torch.no_grad()
    def of(trace: Trace) -> Looks:
        rows = trace.rows
        first = trace.second_pass.first_logit(trace.inputs)
        return Looks(rows.max_logit, rows.entropy, rows.lse, first)


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
        return Statistics.of_each([Looks.of(trace)])[0]

    @staticmethod
    @torch.no_grad()
    def of_each(calls: Sequence[Looks]) -> list[Statistics]:
        """From each of several calls of one size. Together, because on a card each operation takes
        longer to start than to run."""
        max_logit, entropy, lse, first = (torch.stack(rows) for rows in zip(*calls, strict=True))
        first = _share(first, max_logit, lse)
        sound, empty = max_logit.abs() < math.inf, max_logit == -math.inf
        ill = ~sound
        N, B, H, Q = max_logit.shape
        rows = max_logit.new_full((N, H), B * Q)
        counts = [t.sum((1, 3), dtype=rows.dtype) for t in (sound, empty)]
        sums = (
            rows,
            counts[1],
            rows - counts[0] - counts[1],
            max_logit.masked_fill_(ill, -math.inf).amax((1, 3)),
            entropy.masked_fill_(ill, 0.0).sum((1, 3)),
            first.masked_fill_(ill, 0.0).sum((1, 3)),
        )
        return [Statistics(*of_call) for of_call in zip(*(t.unbind() for t in sums), strict=True)]

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


def _share(
    logit: Float[Tensor, "n b h q"],
    max_logit: Float[Tensor, "n b h q"],
    lse: Float[Tensor, "n b h q"],
) -> Float[Tensor, "n b h q"]:
    """The weight of a key, of which the logit was computed once more.

    Whoever trains must not wait until the device says how large logits are, to have large ones
    computed in float64 as other questions do. They round otherwise than in the forward pass; so a
    logit that is the largest as far as its precision tells is taken to be the largest of that pass,
    which none exceeds."""
    below = logit - max_logit
    rounding = ROUNDINGS * torch.finfo(logit.dtype).eps * max_logit.abs()
    below = below.masked_fill_(below >= -rounding, 0.0)
    return below.add_(max_logit - lse).exp_()


@runtime_checkable
class Adds(Protocol):
    """What statistics are added to."""

    def add(self, found: Statistics, /) -> None: ...


class Waiting:
    """Calls whose rows are not added up yet."""

    def __init__(self) -> None:
        self._calls: defaultdict[object, list[tuple[Adds, Looks]]] = defaultdict(list)
        self._rows = 0

    def put(self, whose: Adds, looks: Looks) -> None:
        rows = looks.max_logit
        self._calls[rows.shape, rows.dtype, rows.device].append((whose, looks))
        self._rows += rows.numel()
        if self._rows >= MANY:
            self.settle()

    def settle(self) -> None:
        """Add up what waits, calls of one size together."""
        for calls in self._calls.values():
            found = Statistics.of_each([looks for _, looks in calls])
            for (whose, _), statistics in zip(calls, found, strict=True):
                whose.add(statistics)
        self._calls.clear()
        self._rows = 0
