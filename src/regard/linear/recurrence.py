"""A checked call of gated linear attention or the delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.inputs import AttentionInputs
from regard.linear.chunks import correcting, decays, running
from regard.linear.order import Order
from regard.linear.scan import scan
from regard.linear.state import State

FINE = 16
"""Tokens of a chunk where channels fade apart: each pair of a chunk has as many numbers as
channels."""


@dataclass(frozen=True)
class Recurrence:
    """S_i = a_i S_{i-1} + k_i w_iᵀ, with w = v, or what the delta rule makes of it."""

    inputs: AttentionInputs
    order: Order
    log_decay: Float[Tensor, "b g n m"] | None
    beta: Float[Tensor, "b g n 1"] | None
    scale: float
    given_chunk: int

    @property
    def chunk(self) -> int:
        fine = self.log_decay is not None and self.log_decay.shape[-1] > 1
        return min(self.given_chunk, FINE) if fine else self.given_chunk

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.compute_dtype

    @cached_property
    def seen(self) -> Tensor | None:
        return self.order.seen(self.inputs.shape.K, self.inputs.k.device)

    def run(self, state: State | None) -> Float[Tensor, "b h n e"]:
        """The output; `state` goes on."""
        x = self.inputs
        B, G, N, D = x.k.shape
        shape = (B, G, D, x.v.shape[-1])
        start = x.k.new_zeros(shape, dtype=self.dtype)
        if state is not None:
            state.claim("gated" if self.beta is None else "delta", shape)
            start = start if state.sums is None else state.sums
        runs, before = self.runs(None if state is None else state.last)
        q = x.q.unflatten(1, (max(G, 1), -1))
        sequences = (q, x.k, x.v, self.log_decay, self.beta, self.seen, runs, before)
        (out,), last = scan(self._step, start, sequences, self.chunk)
        if state is not None:
            state.sums, state.tokens = last, state.tokens + N
            if self.order.ids is not None and N:
                state.last = self.order.ids[:, -1].expand(B)
        return out.flatten(1, 2)

    def runs(self, last: Int[Tensor, "b"] | None) -> tuple[Tensor | None, Tensor | None]:
        """The number of each token's document, and of that of the token before."""
        runs = self.order.runs(last)
        if runs is None or not runs.shape[2]:
            return None, None
        return runs, torch.cat([torch.zeros_like(runs[:, :, :1]), runs[:, :, :-1]], 2)

    def prepared(
        self,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        seen: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """All in the precision of sums; padding writes nothing, and nothing fades in it."""
        k, v = k.to(self.dtype), v.to(self.dtype)
        beta = None if beta is None else beta.to(self.dtype)
        if seen is None:
            return k, v, log_decay, beta
        k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
        log_decay, beta = (
            None if t is None else torch.where(seen, t, 0.0) for t in (log_decay, beta)
        )
        return k, v, log_decay, beta

    def _step(
        self,
        state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        seen: Tensor | None,
        runs: Tensor | None,
        before: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        q = q.to(self.dtype) * self.scale
        k, v, log_decay, beta = self.prepared(k, v, log_decay, beta, seen)
        start = None if before is None else before[:, 0, 0, 0]
        of = decays(log_decay, runs, start, self.chunk, self.dtype)
        if beta is None:
            out, last = running(q, k, v, state, of, self.chunk)
        else:
            out, last = correcting(q, k, v, beta, state, of, self.chunk)
        return (out.to(self.inputs.v.dtype),), last
