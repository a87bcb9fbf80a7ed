"""Additive attention's hidden units by the compiled loop: no unit of a pair is written down.

What is done to queries and keys alone (tangents or exponentials, see units.c) is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.tiled.loop import Loop, Units, loop_for
from regard.inputs import AttentionInputs
from regard.scores.comparison import Gradients, TanhSum

NEAR, PLAIN, FAR = range(3)
LEAST, MOST = 1.0, 40.0
"""Where the largest query or key is below the first, and above the second, tanh is made by other
means."""


def unit_loop(x: AttentionInputs) -> Loop | None:
    """The compiled loop, if it compares the pairs of a call."""
    if not isinstance(x.comparison, TanhSum):
        return None
    loop = loop_for(x.q.device, x.compute_dtype)
    return loop if loop is not None and loop.compares_units else None


def scratch_of(x: AttentionInputs) -> int:
    """Numbers held per pair while logits are computed."""
    return 1 if unit_loop(x) is not None else x.comparison.scratch


class PairUnits:
    """The units between some queries [B, G, R, Q, D] and keys [B, G, K, D]."""

    def __init__(self, loop: Loop, q: Tensor, k: Tensor, w: Tensor) -> None:
        self.loop, self.q, self.k = loop, q.detach(), k.detach()
        self.w = w.detach().to(q.dtype).contiguous()
        span = max(float(t.abs().amax()) if t.numel() else 0.0 for t in (self.q, self.k))
        self.mode = NEAR if span < LEAST else PLAIN if span <= MOST else FAR

    def _mapped(self, t: Tensor) -> Tensor:
        if self.mode == NEAR:
            return t.tanh()
        return (2 * t).exp_() if self.mode == PLAIN else t

    @cached_property
    def _turned(self) -> Float[Tensor, "b g d k"]:
        return self._mapped(self.k).mT.contiguous()

    @cached_property
    def _queries(self) -> Float[Tensor, "b g r q d"]:
        return self._mapped(self.q).contiguous()

    def logits(self, rows: slice, keys: slice) -> Float[Tensor, "b g r q k"]:
        """Logits of some queries and keys."""
        q = self._queries[:, :, :, rows].contiguous()
        s = q.new_empty(*q.shape[:4], keys.stop - keys.start)
        self._call(self.loop.compare_units, q, keys, {"logits": s})
        return s

    def pull_back(self, rows: slice, keys: slice, d: Float[Tensor, "b g r q k"]) -> Gradients:
        """What a gradient of those logits gives back."""
        q = self._queries[:, :, :, rows].contiguous()
        B, G, R, _, D = q.shape
        dq, dw = torch.empty_like(q), q.new_empty(B, G, R, D)
        dk = q.new_zeros(B, G, D, keys.stop - keys.start)
        to = {"d": d.contiguous(), "dq": dq, "dk": dk, "dw": dw}
        self._call(self.loop.pull_units, q, keys, to)
        own = dw.sum(0).flatten(0, 1)
        return Gradients(dq, dk.mT, [own if self.w.ndim == 2 else own.sum(0)])

    def _call(
        self,
        run: Callable[[Units, int], None],
        q: Tensor,
        keys: slice,
        memory: dict[str, Tensor],
    ) -> None:
        B, G, R, Q, D = q.shape
        k = self._turned
        step = k.element_size() * keys.start
        call = Units(
            q=q.data_ptr(), k=k.data_ptr() + step, w=self.w.data_ptr(),
            **{name: t.data_ptr() for name, t in memory.items()},
            B=B, G=G, R=R, Q=Q, K=keys.stop - keys.start, D=D, k_head=k.shape[2] * k.shape[3],
            k_unit=k.shape[3], w_head=0 if self.w.ndim == 1 else D, mode=self.mode,
        )  # fmt: skip
        run(call, torch.get_num_threads())
