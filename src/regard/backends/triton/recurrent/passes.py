"""The passes of gated linear attention and the delta rule, as launches of their kernels.

Forward: decays are summed along chunks, the delta rule's triangular systems solved, the state taken
from chunk to chunk, then outputs made. Backward: the state's gradient is taken from chunk to chunk,
then all others are made. No program adds to what another writes, so every run gives the same
numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.triton.arguments import on_card, sheet, tiles_of
from regard.backends.triton.launches.launched import together
from regard.backends.triton.recurrent.chunk import C, Fading, running_decays
from regard.backends.triton.recurrent.corrections import corrections
from regard.backends.triton.recurrent.gradients import decay_gradients, query_and_key_gradients
from regard.backends.triton.recurrent.outputs import outputs, value_gradients
from regard.backends.triton.recurrent.scans import gradients_along, states_along
from regard.backends.triton.recurrent.segments import carry_along
from regard.backends.triton.recurrent.tiles import Tiles, segment_of, tiles_for


class Given(NamedTuple):
    """What a call is of."""

    q: Float[Tensor, "b h n m"]
    k: Float[Tensor, "b g n m"]
    v: Float[Tensor, "b g n e"]
    log_decay: Float[Tensor, "b g n"] | None
    beta: Float[Tensor, "b g n"] | None
    start: Float[Tensor, "b g m e"] | None


class Kept(NamedTuple):
    """What a backward pass wants back."""

    fading: Fading | None
    solved: Float[Tensor, "b g n c"] | None
    turns: Float[Tensor, "b g s m em"] | None
    states: Float[Tensor, "b g c1 m e"]
    written: Float[Tensor, "b g n e"]


class Found(NamedTuple):
    """What a forward pass gives."""

    out: Float[Tensor, "b h n e"]
    last: Float[Tensor, "b g m e"]
    kept: Kept


class _Launch:
    """Sizes of one call, and its launches."""

    def __init__(self, given: Given, scale: float) -> None:
        q, k, v, log_decay, beta, start = given
        self.q, self.k, self.v, self.scale = q, k, v, scale
        self.log_decay = None if log_decay is None else log_decay.contiguous()
        self.beta = None if beta is None else beta.contiguous()
        self.start = None if start is None else start.contiguous()
        self.B, self.H, self.N, self.M = q.shape
        self.G, self.E = k.shape[1], v.shape[3]
        self.group = self.H // self.G
        self.how: Tiles = tiles_for(q, v)
        self.chunks = tiles_of(self.N, C.value)
        blocks = self._blocks(self._of_states(self.E))
        programs = self.B * self.G * blocks
        self.many = segment_of(self.chunks, programs, self.M, delta=beta is not None)
        self.segments = tiles_of(self.chunks, self.many)

    def _of_states(self, columns: int) -> dict[str, Any]:
        """What kernels are compiled for that go from chunk to chunk, with states so wide."""
        found = self.how.of_states(self.M, self.E, whole=self.beta is not None)
        return found | {"W": columns}

    def _blocks(self, of_states: dict[str, Any]) -> int:
        down = tiles_of(of_states["M"], of_states["BM"])
        return down * tiles_of(of_states["W"], of_states["BE"])

    def _state(
        self, *counted: int, width: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        width = self.E if width is None else width
        return self.q.new_empty(self.B, self.G, *counted, self.M, width, dtype=dtype)

    def forward(self) -> Found:
        with on_card(self.q), together():
            fading = self._fading()
            solved = self._solved(fading)
            written = self.v
            if solved is not None:
                written = self.v.new_empty(self.v.shape, dtype=self.how.held)
            states = self._state(self.chunks + 1, dtype=self.how.held)
            last, turns = self._along(fading, solved, states, written)
            out = self.v.new_empty(self.B, self.H, self.N, self.E)
            constants = self.how.of_values(self.M, self.E)
            grid = self.chunks, self.B * self.H, tiles_of(self.E, constants["BE"])
            outputs[grid](
                sheet(self.q), sheet(self.k), sheet(written), fading, states, sheet(out),
                self.scale, self.N, self.H, self.group, self.chunks, **constants,
            )  # fmt: skip
        return Found(out, last, Kept(fading, solved, turns, states, written))

    def _fading(self) -> Fading | None:
        if self.log_decay is None:
            return None
        fading = Fading(*self.q.new_empty(2, *self.log_decay.shape, dtype=torch.float32))
        running_decays[(self.chunks, self.B * self.G)](self.log_decay, fading, self.N, num_warps=1)
        return fading

    def _solved(self, fading: Fading | None) -> Tensor | None:
        if self.beta is None:
            return None
        solved = self.k.new_empty(self.B, self.G, self.N, C.value, dtype=self.how.held)
        corrections[(self.chunks, self.B * self.G)](
            sheet(self.k), self.beta, fading, solved, self.N, self.G,
            **self.how.of_corrections(self.M),
        )  # fmt: skip
        return solved

    def _along(
        self, fading: Fading | None, solved: Tensor | None, states: Tensor, written: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The state before every chunk, what is written, and the state at the end."""
        inverse = None if solved is None else sheet(solved)

        def run(first: Tensor | None, last: Tensor, *, keep: bool) -> None:
            constants = self._of_states(last.shape[-1])
            states_along[(self.segments, self.B * self.G, self._blocks(constants))](
                sheet(self.k), sheet(self.v), self.beta, fading, inverse, first,
                states if keep else None, sheet(written) if keep else None, last,
                self.N, self.G, self.many, self.chunks, **constants,
            )  # fmt: skip

        last, width = self._state(), self.E if solved is None else self.E + self.M
        if self.segments == 1:
            run(self.start, last, keep=True)
            return last, None
        sums = self._state(self.segments, width=width)
        run(None, sums, keep=False)
        turns = None if solved is None else sums
        begins = self._carried(sums, turns, fading, self.start, last, backwards=False)
        run(begins, self._state(self.segments), keep=True)
        return last, turns

    def _carried(
        self, sums: Tensor, turns: Tensor | None, fading: Fading | None, first: Tensor | None,
        last: Tensor, *, backwards: bool,
    ) -> Tensor:  # fmt: skip
        begins = self._state(self.segments)
        found = self._of_states(self.E)
        blocks = self._blocks(found)
        constants = {name: found[name] for name in ("M", "E", "BM", "BE", "PRECISION", "num_warps")}
        constants["W"] = sums.shape[-1]
        carry_along[(self.B * self.G, blocks)](
            sums, turns, fading, first, begins, last, self.N, self.many, self.chunks, self.segments,
            BACKWARDS=backwards, **constants,
        )  # fmt: skip
        return begins

    def backward(self, kept: Kept, g: Tensor, g_last: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, log_decay, beta, and the state at the start."""
        fading, solved, _, states, written = kept
        q, k, v, gs = sheet(self.q), sheet(self.k), sheet(self.v), sheet(g.to(self.v.dtype))
        dq, dk, dv = (t.new_empty(t.shape) for t in (self.q, self.k, self.v))
        behind = self._state(self.chunks, dtype=self.how.held)
        corrected = None
        with on_card(self.q), together():
            if solved is not None:
                corrected, local = (torch.empty_like(written) for _ in range(2))
                self._value_gradients(q, k, gs, fading, None, local)
                d_start = self._backwards(kept, gs, local, g_last, behind, corrected, dv)
            else:
                d_start = self._backwards(kept, gs, None, g_last, behind, None, dv)
                self._value_gradients(q, k, gs, fading, behind, dv)
            constants = self.how.of_features(self.M, self.E)
            blocks = tiles_of(self.M, constants["BM"])
            fades, rates = (
                None if t is None else d_start.new_empty(blocks, *t.shape)
                for t in (self.log_decay, self.beta)
            )
            ends = None if fades is None else fades.new_empty(blocks, self.B, self.G, self.chunks)
            query_and_key_gradients[(self.chunks, self.B * self.G, blocks)](
                q, k, v, gs, self.beta, fading, sheet(written),
                None if corrected is None else sheet(corrected), states, behind,
                sheet(dq), sheet(dk), rates, fades, ends, self.scale, self.N, self.G, self.group,
                self.chunks, **constants,
            )  # fmt: skip
            d_decay = None
            if self.log_decay is not None:
                d_decay = torch.empty_like(self.log_decay)
                decay_gradients[(self.chunks, self.B * self.G)](
                    self.log_decay, fades, ends, d_decay, self.N, self.chunks, blocks, num_warps=1
                )
        d_beta = None
        if rates is not None and self.beta is not None:
            d_beta = (rates[0] if blocks == 1 else rates.sum(0)).to(self.beta.dtype)
        return dq, dk, dv, d_decay, d_beta, d_start

    def _value_gradients(
        self, q: Any, k: Any, g: Any, fading: Fading | None, behind: Tensor | None, dv: Tensor
    ) -> None:
        constants = self.how.of_values(self.M, self.E)
        grid = self.chunks, self.B * self.G, tiles_of(self.E, constants["BE"])
        value_gradients[grid](
            q, k, g, fading, behind, sheet(dv), self.scale, self.N, self.G, self.group, self.chunks,
            **constants,
        )  # fmt: skip

    def _backwards(
        self, kept: Kept, g: Any, local: Tensor | None, g_last: Tensor | None, behind: Tensor,
        corrected: Tensor | None, dv: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient of the state behind every chunk, and of that at the start."""
        constants = self._of_states(self.E)
        grid = self.segments, self.B * self.G, self._blocks(constants)
        del constants["W"]
        own = None if local is None else sheet(local)
        inverse = None if kept.solved is None else sheet(kept.solved)

        def run(first: Tensor | None, last: Tensor, *, keep: bool) -> None:
            z = sheet(corrected) if keep and corrected is not None else None
            gradients_along[grid](
                sheet(self.q), sheet(self.k), g, self.beta, kept.fading, inverse, own, first,
                behind if keep else None, z, sheet(dv), last, self.scale, self.N, self.G,
                self.many, self.chunks, GROUP=self.group, **constants,
            )  # fmt: skip

        first = None if g_last is None else g_last.to(torch.float32).contiguous()
        d_start = self._state()
        if self.segments == 1:
            run(first, d_start, keep=True)
            return d_start
        sums = self._state(self.segments)
        run(None, sums, keep=False)
        begins = self._carried(sums, kept.turns, kept.fading, first, d_start, backwards=True)
        run(begins, sums, keep=True)
        return d_start


def forward(given: Given, scale: float) -> Found:
    """Output, the state at the end, and what the backward pass wants back."""
    return _Launch(given, scale).forward()


def backward(
    given: Given, scale: float, kept: Kept, g: Tensor, g_last: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of all that is given, of a state at the start also where there is none."""
    return _Launch(given, scale).backward(kept, g, g_last)
