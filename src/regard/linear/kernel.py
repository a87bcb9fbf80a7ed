"""Linear attention whose weights are shares: products of features, divided by their sum.

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)

The sum over keys does not depend on the query: Σ_j φ(k_j) v_jᵀ is one small matrix. The sum of
weights is the mix of values that are all 1: one more column carries it along.
"""

from __future__ import annotations

import math
from copy import copy
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.backends.passes import no_autocast
from regard.backends.triton.linear.refusals import why_not
from regard.linear.choice import takes_kernels
from regard.linear.chunks import Decays, decays, running
from regard.linear.features import FeatureMap, as_it_is, is_fixed, largest, of_keys, of_queries
from regard.linear.order import Order
from regard.linear.scan import scan
from regard.linear.state import State
from regard.linear.windows import windowed

NONE = Decays(None, None, None, None)
Stepped = tuple[tuple[Tensor, ...], Tensor]


class Mixed(NamedTuple):
    """Output, and the sum of the weights before they are divided by it."""

    out: Float[Tensor, "b h q e"]
    total: Float[Tensor, "b h q 1"]


def mixed(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b g k d"],
    v: Float[Tensor, "b g k e"],
    features: FeatureMap,
    order: Order,
    chunk: int,
    state: State | None = None,
    backend: str | None = None,
) -> Mixed:
    """Attention of heads already split and checked, in O(n) memory and time."""
    with no_autocast(q):
        return Kernel(q, k, v, features, order, chunk, state).run(backend)


class Kernel:
    """One call, on its way."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        features: FeatureMap,
        order: Order,
        chunk: int,
        state: State | None,
    ) -> None:
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.features, self.order, self.chunk, self.state = features, order, chunk, state
        self.seen = order.seen(k.shape[2], k.device)
        self.runs = order.runs(None if state is None else state.last)
        self.q, self.k, self.v = q.unflatten(1, (max(k.shape[1], 1), -1)), k, v
        if not is_fixed(features):
            # A feature map given as a function has its gradient outside: its features are kept
            # whole.
            self.q = features(self.q.to(self.dtype))
            k = k if self.seen is None else torch.where(self.seen, k, 0.0)
            self.k = features(k.to(self.dtype))
            self.features = as_it_is
        self.shift, self.start = self._begin()

    def _begin(self) -> tuple[Tensor | None, Tensor]:
        """The factor that keys are divided by, and the state to start from, divided alike."""
        k, state = self.k, self.state
        shift = largest(self.features, k.to(self.dtype), self.seen)
        if state is None or state.sums is None:
            if shift is not None:
                shift = torch.where(shift == -math.inf, 0.0, shift)
            width = self._width()
            sums = k.new_zeros(*k.shape[:2], width, self.v.shape[-1] + 1, dtype=self.dtype)
            if state is not None:
                state.claim("attention", tuple(sums.shape))
            return shift, sums
        sums = state.sums.to(self.dtype)
        state.claim("attention", (*k.shape[:2], self._width(), self.v.shape[-1] + 1))
        if shift is None:
            return None, sums
        assert state.shift is not None
        before = state.shift.to(self.dtype)
        shift = torch.maximum(shift, before)
        return shift, sums * (before - shift).exp()

    def _width(self) -> int:
        one = self.k.new_zeros(1, 1, 1, self.k.shape[-1], dtype=self.dtype)
        return of_queries(self.features, one).shape[-1]

    def run(self, backend: str | None = None) -> Mixed:
        tensors = self.q, self.k, self.v, self.start
        if takes_kernels(backend, tensors, self.q.shape[3], self._why_not):
            return self._in_kernels()
        parts = self.q, self.k, self.v, self.seen
        if self.order.window is not None and self.k.shape[2]:
            found, last = self._window(self.order.window)
        elif self.runs is not None and self.k.shape[2]:
            found, last = self._documents(parts, self.runs)
        elif self.order.causal:
            found, last = scan(self._causal, self.start, parts, self.chunk)
        else:
            _, last = scan(self._absorb, self.start, parts[1:], self.chunk)
            found, _ = scan(self._read, last, parts[:1], self.chunk)
        self._remember(last)
        out, total = found
        return Mixed(out.flatten(1, 2), total.flatten(1, 2))

    def _why_not(self) -> list[str]:
        q = self.q.flatten(1, 2)
        if self.start.shape[2] != q.shape[-1]:
            q = q[..., :1].expand(*q.shape[:-1], self.start.shape[2])
        both_ways = self.order.ids is not None and not self.order.causal
        reasons = why_not(q, self.k, self.v, both_ways=both_ways)
        if self.order.window is not None:
            reasons.append("its sums run on, where those of a window slide")
        return reasons

    def _in_kernels(self) -> Mixed:
        from regard.backends.triton.linear.function import Fused
        from regard.backends.triton.linear.passes import MAPS, Call

        q, k, name = self.q, self.k, getattr(self.features, "__name__", "")
        if name not in MAPS:
            # What no kernel knows is made before.
            q, k = self._queries(q), of_keys(self.features, k.to(self.dtype), self.shift, self.seen)
            name = as_it_is.__name__
            plain = self._with(as_it_is)
        else:
            plain = self
        call = Call(name, self.order.causal, self.order.lengths, self.runs)
        out, total, last = Fused.apply(  # type: ignore[no-untyped-call]
            plain._plainly, call, q.flatten(1, 2), k, self.v, self.start
        )
        self._remember(last)
        return Mixed(out, total)

    def _with(self, features: FeatureMap) -> Kernel:
        """The same call with features in place of what they are made of."""
        other = copy(self)
        other.features, other.shift = features, None
        return other

    def _plainly(
        self, q: Tensor, k: Tensor, v: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In PyTorch's operations, as one segment."""
        q = q.unflatten(1, (k.shape[1], -1))
        if self.runs is not None:
            (found,), last = self._within(
                0, start, q, k, v, self.seen, self.runs, _shifted(self.runs)
            )
            out, total = self._divided(found)
        elif self.order.causal:
            (out, total), last = self._causal(start, q, k, v, self.seen)
        else:
            _, last = self._absorb(start, k, v, self.seen)
            (out, total), _ = self._read(last, q)
        return out.flatten(1, 2), total.flatten(1, 2), last

    def _remember(self, last: Tensor) -> None:
        if self.state is None:
            return
        self.state.sums, self.state.shift = last, self.shift
        self.state.tokens += self.k.shape[2]
        if self.order.ids is not None and self.order.ids.shape[1]:
            self.state.last = self.order.ids[:, -1].expand(len(self.k))

    def _keys(self, k: Tensor, v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features of keys, and values with a column of ones; 0 where nothing is seen."""
        v = pad(v.to(self.dtype), (0, 1), value=1.0)
        v = v if seen is None else torch.where(seen, v, 0.0)
        return of_keys(self.features, k.to(self.dtype), self.shift, seen), v

    def _queries(self, q: Tensor) -> Tensor:
        return of_queries(self.features, q.to(self.dtype))

    def _causal(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None
    ) -> Stepped:
        k, v = self._keys(k, v, seen)
        found, last = running(self._queries(q), k, v, state, NONE, self.chunk)
        return self._divided(found), last

    def _absorb(self, state: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Stepped:
        k, v = self._keys(k, v, seen)
        return (), state + k.mT @ v

    def _read(self, state: Tensor, q: Tensor) -> Stepped:
        return self._divided(self._queries(q) @ state[:, :, None]), state

    def _documents(
        self, parts: tuple[Tensor | None, ...], runs: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Sums that start anew where a document does. What comes after a query, if it is seen, is
        summed from the end."""
        sequences = (*parts, runs, _shifted(runs))
        (found,), last = scan(partial(self._within, 0), self.start, sequences, self.chunk)
        if not self.order.causal:
            turned = [None if t is None else t.flip(-2) for t in (*parts, runs)]
            assert turned[4] is not None
            ahead = torch.cat([turned[4][:, :, :1], turned[4][:, :, :-1]], 2)
            nothing = torch.zeros_like(self.start)
            later = scan(partial(self._within, -1), nothing, (*turned, ahead), self.chunk)
            found = found + later[0][0].flip(-2)
        return self._divided(found), last

    def _within(
        self,
        diag: int,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Tensor | None,
        runs: Tensor,
        before: Tensor,
    ) -> Stepped:
        k, v = self._keys(k, v, seen)
        of = decays(None, runs, before[:, 0, 0, 0], self.chunk, self.dtype)
        found, last = running(self._queries(q), k, v, state, of, self.chunk, diag=diag)
        return (found,), last

    def _window(self, sides: tuple[int, int]) -> Stepped:
        """Of a window there is no state."""
        k, v = self._keys(self.k, self.v, self.seen)
        left, right = sides
        sides = left, 0 if self.order.causal else right
        found = windowed(self._queries(self.q), k, v, self.runs, sides, self.chunk)
        return self._divided(found), self.start

    def _divided(self, found: Float[Tensor, "b g r n e1"]) -> tuple[Tensor, Tensor]:
        """A query whose features meet no key's gives 0."""
        out, total = found[..., :-1], found[..., -1:]
        empty = total == 0
        out = torch.where(empty, 0.0, out / torch.where(empty, 1.0, total))
        return out.to(self.v.dtype), total


def _shifted(runs: Int[Tensor, "b 1 n 1"]) -> Int[Tensor, "b 1 n 1"]:
    """The document before each token; before the first it is 0, that of the state."""
    return torch.cat([torch.zeros_like(runs[:, :, :1]), runs[:, :, :-1]], 2)
