"""The passes of linear attention, forward and backward, as launches of its kernels.

Three launches make a forward pass: sums of segments, sums of all segments before each, outputs. The
backward pass does the same with a state of queries. No program adds to what another writes, so
every run gives the same numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.triton.arguments import on_card, sheet, tiles_of, wide
from regard.backends.triton.launches.launched import together
from regard.backends.triton.linear.gradients import (
    key_gradients,
    query_gradients,
    row_numbers,
    value_gradients,
)
from regard.backends.triton.linear.outputs import outputs
from regard.backends.triton.linear.states import carry, segment_sums
from regard.backends.triton.linear.tiles import Tiles, segment_of, tiles_for
from regard.backends.triton.pairs import Sizes

_BLOCK = 1024
_ROWS = 32
MAPS = {"as_it_is": 0, "elu_plus_one": 1, "relu": 2}


class Call(NamedTuple):
    """What a call is beside q, k, v and the state it starts from."""

    map: str
    causal: bool
    limits: Int[Tensor, "b"] | None
    runs: Int[Tensor, "b 1 k 1"] | None = None
    """The number of each token's document; 0 is that of the state it starts from."""


class Found(NamedTuple):
    """What a forward pass gives, and what its backward pass wants back."""

    out: Float[Tensor, "b h q e"]
    total: Float[Tensor, "b h q 1"]
    last: Float[Tensor, "b g m e1"]
    before: Float[Tensor, "b g s m e1"]


class _Launch:
    """Sizes of one call, and its launches."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.call, self.q, self.k, self.v = call, q, k, v
        self.B, self.H, self.Q, self.M = q.shape
        self.G, self.K, self.E = k.shape[1], k.shape[2], v.shape[3]
        self.n = Sizes(self.Q, self.K, self.H, self.H // self.G)
        self.how: Tiles = tiles_for(q, v)
        self.limits = None
        if call.limits is not None:
            self.limits = call.limits.to(device=q.device, dtype=torch.int32).expand(self.B)
            self.limits = self.limits.contiguous()
        self.runs = None
        if call.runs is not None:
            runs = call.runs.to(device=q.device, dtype=torch.int32).reshape(-1, self.K)
            self.runs = runs.expand(self.B, -1).contiguous()
        blocks = tiles_of(wide(self.E), self.how.columns)
        longest = max(self.Q, self.K)
        self.segment = segment_of(longest, self.B * self.H * blocks, self.how.rows)

    def constants(self, *, features: bool, ordered: bool = True) -> dict[str, Any]:
        found = self.how.constants(self.M, self.E, features=features)
        found["MAP"] = MAPS[self.call.map]
        return found | ({"CAUSAL": self.call.causal} if ordered else {})

    def grid(self, length: int, heads: int, *, features: bool) -> tuple[int, int, int]:
        """Segments, heads, and blocks of columns."""
        constants = self.how.constants(self.M, self.E, features=features)
        width, block = (self.M, constants["BM"]) if features else (self.E, constants["BE"])
        return tiles_of(length, self.segment), self.B * heads, tiles_of(width, block)

    def states(
        self,
        x: Tensor,
        y: Tensor,
        limits: Tensor | None,
        rows: tuple[Tensor, Tensor] | tuple[None, None],
        first: Tensor | None,
        *,
        backwards: bool,
    ) -> tuple[Tensor, Tensor]:
        """Sums before every segment (or behind it), and of all."""
        length, heads = x.shape[2], x.shape[1]
        grid = self.grid(length, self.G, features=False)
        size = self.M * (self.E + 1)
        sums = x.new_empty(self.B, self.G, grid[0], self.M, self.E + 1, dtype=torch.float32)
        last = sums.new_empty(self.B, self.G, self.M, self.E + 1)
        segment_sums[grid](
            sheet(x), sheet(y), limits, self.runs, *rows, sums, length, heads, self.G, self.segment,
            **self.constants(features=False, ordered=False),
        )  # fmt: skip
        carry[(self.B * self.G, tiles_of(size, _BLOCK))](
            sums, None if first is None else first.contiguous(), last, self.runs, grid[0], size,
            self.G, length, self.segment, BACKWARDS=backwards, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        return sums, last

    def forward(self, start: Tensor | None) -> Found:
        with on_card(self.q), together():
            before, last = self.states(
                self.k, self.v, self.limits, (None, None), start, backwards=False
            )
            out = self.v.new_empty(self.B, self.H, self.Q, self.E)
            total = last.new_empty(self.B, self.H, self.Q, 1)
            grid = self.grid(self.Q, self.H, features=False)
            outputs[grid](
                sheet(self.q), sheet(self.k), sheet(self.v), self.limits, self.runs,
                self._of(before, last), sheet(out), total, self.n, self.segment, grid[0],
                **self.constants(features=False),
            )  # fmt: skip
        return Found(out, total, last, before)

    def backward(
        self, found: Found, g: Tensor, g_total: Tensor | None, g_last: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q, k, v and the state at the start."""
        g = g.to(self.v.dtype)
        factor, extra = (torch.empty_like(found.total) for _ in range(2))
        dq, dk, dv = (t.new_empty(t.shape) for t in (self.q, self.k, self.v))
        q, k, v, gs = sheet(self.q), sheet(self.k), sheet(self.v), sheet(g)
        with on_card(self.q), together():
            row_numbers[(tiles_of(self.Q, _ROWS), self.B * self.H)](
                gs, sheet(found.out), found.total,
                None if g_total is None else g_total.contiguous(), factor, extra, self.n,
                E=self.E, BE=wide(self.E), BN=_ROWS, num_warps=4,
            )  # fmt: skip
            behind, d_start = self.states(self.q, g, None, (factor, extra), g_last, backwards=True)
            rest = self.n, self.segment
            grid = self.grid(self.Q, self.H, features=True)
            query_gradients[grid](
                q, k, v, gs, self.limits, self.runs, self._of(found.before, found.last), factor,
                extra, sheet(dq), *rest, grid[0], **self.constants(features=True),
            )  # fmt: skip
            states = self._of(behind, d_start)
            grid = self.grid(self.K, self.G, features=True)
            key_gradients[grid](
                q, k, v, gs, self.limits, self.runs, states, factor, extra, sheet(dk), *rest,
                grid[0], **self.constants(features=True),
            )  # fmt: skip
            grid = self.grid(self.K, self.G, features=False)
            value_gradients[grid](
                q, k, gs, self.limits, self.runs, states, factor, sheet(dv), *rest, grid[0],
                **self.constants(features=False),
            )  # fmt: skip
        return dq, dk, dv, d_start

    def _of(self, parts: Tensor, whole: Tensor) -> Tensor:
        """The states that segments begin with: in no order they all have the whole."""
        return parts if self.call.causal else whole


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> Found:
    """Output, sums of weights, and states; q [B, H, Q, M], k [B, G, K, M], v [B, G, K, E]."""
    return _Launch(call, q, k, v).forward(start)


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Found,
    g: Tensor,
    g_total: Tensor | None,
    g_last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the state at the start."""
    return _Launch(call, q, k, v).backward(found, g, g_total, g_last)
