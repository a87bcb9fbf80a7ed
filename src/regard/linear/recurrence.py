"""A checked call of gated linear attention or the delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.triton.linear.refusals import why_not
from regard.inputs import AttentionInputs
from regard.linear.choice import takes_kernels
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
    backend: str | None = None

    @property
    def chunk(self) -> int:
        fine = self.log_decay is not None and self.log_decay.shape[-1] > 1
        return min(self.given_chunk, FINE) if fine else self.given_chunk

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.compute_dtype

    @property
    def seen(self) -> Tensor | None:
        return self.order.seen(self.inputs.shape.K, self.inputs.k.device)

    def run(self, state: State | None) -> Float[Tensor, "b h n e"]:
        """The output; `state` goes on."""
        x = self.inputs
        B, G, N, D = x.k.shape
        shape = (B, G, D, x.v.shape[-1])
        start = None
        if state is not None:
            state.claim("gated" if self.beta is None else "delta", shape)
            start = None if state.sums is None else state.sums.to(self.dtype)
        runs, before = self.runs(None if state is None else state.last)
        tensors = x.q, x.k, x.v, self.log_decay, self.beta, start
        if takes_kernels(self.backend, tensors, N, self._why_not):
            out, last = self._in_kernels(start, runs, before)
        else:
            start = x.k.new_zeros(shape, dtype=self.dtype) if start is None else start
            q = x.q.unflatten(1, (max(G, 1), -1))
            sequences = (q, x.k, x.v, self.log_decay, self.beta, self.seen, runs, before)
            (out,), last = scan(self._step, start, sequences, self.chunk)
            out = out.flatten(1, 2)
        if state is not None:
            state.sums, state.tokens = last, state.tokens + N
            if self.order.ids is not None and N:
                state.last = self.order.ids[:, -1].expand(B)
        return out

    def _why_not(self) -> list[str]:
        x = self.inputs
        reasons = why_not(x.q, x.k, x.v, both_ways=False)
        if self.log_decay is not None and self.log_decay.shape[-1] > 1:
            reasons.append("its kernels fade all channels of a head alike")
        return reasons

    def _in_kernels(
        self, start: Tensor | None, runs: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from regard.backends.triton.recurrent.function import Recurrent

        x, log_decay, beta = self.inputs, self.log_decay, self.beta
        k, v = x.k, x.v
        if self.seen is not None:
            k, v, log_decay, beta = self._hidden(self.seen, k, v, log_decay, beta)
        if runs is not None and before is not None:
            # To a document that begins, nothing is left.
            if log_decay is None:
                log_decay = x.k.new_zeros(*x.k.shape[:3], 1, dtype=torch.float32)
            log_decay = torch.where(runs != before, -torch.inf, log_decay)
        numbers = (None if t is None else t.squeeze(-1) for t in (log_decay, beta))
        out, last = Recurrent.apply(  # type: ignore[no-untyped-call]
            self._plainly, self.scale, x.q, k, v, *numbers, start
        )
        return out, last

    def _plainly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        start: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """In PyTorch's operations, as one segment, what the kernels are given."""
        if start is None:
            start = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=self.dtype)
        log_decay, beta = (None if t is None else t[..., None] for t in (log_decay, beta))
        q = q.unflatten(1, (k.shape[1], -1))
        (out,), last = self._step(start, q, k, v, log_decay, beta, None, None, None)
        return out.flatten(1, 2), last

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
        return (
            (k, v, log_decay, beta) if seen is None else self._hidden(seen, k, v, log_decay, beta)
        )

    @staticmethod
    def _hidden(
        seen: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
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
