"""What training wants to know of each head, added up without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard import masks
from regard.biases.dense import Dense
from regard.inputs import AttentionInputs
from regard.masks.tiles import band_edges, seen_keys
from regard.scores.comparison import Dot
from regard.traces import Trace
from regard.watching.statistics import Statistics

NOTHING = -1e4
"""What a bias takes away, at least, to hide a pair."""


@dataclass(frozen=True)
class Telemetry:
    """Statistics of each head's rows, and what plain watching would pay too much for. All [H]."""

    statistics: Statistics
    mean_logit: Float[Tensor, "h"]
    """The mean logit of each row, summed over rows that see something and nothing broken, as are
    the next two."""
    room: Float[Tensor, "h"]
    """The log of how many places a row may look at: the most that its entropy could be."""
    sink: Float[Tensor, "h"]
    """What falls on the first key, and on a learned sink."""
    output: Float[Tensor, "h"]
    """The mean square of each output row."""
    non_finite: Float[Tensor, "h"]
    """Rows with NaN or infinity among their logits or in their output."""
    infinite: Float[Tensor, "h"]
    """Rows whose largest logit is infinite."""

    @staticmethod
    @torch.no_grad()
    def of(trace: Trace, statistics: Statistics) -> Telemetry:
        """From one call and its statistics."""
        x, rows = _as_masked(trace.inputs), trace.rows
        with torch.autocast(x.q.device.type, enabled=False):
            seeing = rows.max_logit.isfinite()
            mean = _mean_logit_of_band(x)
            if mean is None:
                mean = trace.second_pass.mean_logit(x)
            places = open_places(x).to(rows.lse.dtype)
            size = torch.linalg.vector_norm(rows.out, dim=-1, dtype=rows.lse.dtype)
            whole = size.isfinite()
            broken = ~(seeing | (rows.max_logit == -torch.inf)) | ~whole

            def summed(t: Tensor, where: Tensor = seeing) -> Tensor:
                return t.expand_as(where).masked_fill(~where, 0.0).sum((0, 2))

            sink = statistics.first
            if x.sink is not None:
                sink = sink + summed((x.sink.to(rows.lse.dtype)[:, None] - rows.lse).exp())
                # Two roundings of large logits may add up to more than the rows have.
                sink = torch.minimum(sink, summed(torch.ones_like(rows.lse)))
            return Telemetry(
                statistics,
                summed(mean),
                summed(places.clamp_min(1).log()),
                sink,
                summed(size.square() / max(rows.out.shape[-1], 1), seeing & whole),
                broken.to(rows.lse.dtype).sum((0, 2)),
                (rows.max_logit == torch.inf).to(rows.lse.dtype).sum((0, 2)),
            )

    def __add__(self, other: Telemetry) -> Telemetry:
        return Telemetry(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def nothing(self) -> Telemetry:
        """Of no rows: what changes no sum."""
        zeros = Telemetry.read(torch.zeros_like(self.stacked()))
        nowhere = torch.full_like(self.room, -torch.inf)
        return replace(zeros, statistics=replace(zeros.statistics, max_logit=nowhere))

    def stacked(self) -> Float[Tensor, "n h"]:
        """Everything in one tensor, to be copied at once: what `Telemetry.read` takes apart."""
        sums, own = self.statistics, [getattr(self, f.name) for f in fields(self)[1:]]
        return torch.stack([*(getattr(sums, f.name) for f in fields(sums)), *own])

    @staticmethod
    def read(stacked: Float[Tensor, "n h"]) -> Telemetry:
        many = len(fields(Statistics))
        return Telemetry(Statistics(*stacked[:many]), *stacked[many:])


def _as_masked(x: AttentionInputs) -> AttentionInputs:
    """Float masks often hold a large negative number in place of minus infinity, whose weight is 0
    all the same. It is no logit that anybody means."""
    if not isinstance(x.bias, Dense):
        return x
    tensor = x.bias.tensor
    return replace(x, bias=Dense(tensor.masked_fill(tensor <= NOTHING, -torch.inf)))


def open_places(x: AttentionInputs) -> Tensor:
    """How many places each row may look at, a sink being one more: broadcasts to [B, H, Q]."""
    allowed = x.mask
    if isinstance(x.bias, Dense):
        # A float mask: minus infinity hides a pair. It is as large as this already.
        shown = masks.keep(x.bias.tensor != -torch.inf).bind(x.shape, x.q.device)
        allowed = shown if allowed is None else allowed & shown
    extra = x.sink is not None
    if allowed is None:
        return torch.full((1, 1, 1), x.shape.K + extra, device=x.q.device)
    return seen_keys(allowed, x.shape, x.q.device) + extra


def _mean_logit_of_band(x: AttentionInputs) -> Float[Tensor, "b h q"] | None:
    """The mean of q·k over keys is q·(the mean of keys), which prefix sums give for every band in
    O(n). None where logits are more than scaled products, or the mask is no band.

    Keys that are not finite count as 0: who sees them is not asked for a mean."""
    band = (-torch.inf, torch.inf) if x.mask is None else x.mask.band()
    plain = isinstance(x.comparison, Dot) and x.bias is None and x.softcap is None
    if band is None or not plain or not x.shape.K:
        return None
    assert isinstance(x.comparison, Dot)
    k = x.k.to(x.compute_dtype).nan_to_num(0.0, 0.0, 0.0)
    start, stop = band_edges(band, x.shape, x.q.device)
    if x.mask is None:
        total = k.sum(2, keepdim=True)
    else:
        before = _before(k)
        total = before[:, :, stop]
        if band[0] > -x.shape.Q:
            total -= before[:, :, start]
    q = x.q.to(x.compute_dtype).unflatten(1, (-1, x.group))
    products: Tensor = (q * total[:, :, None]).sum(-1).flatten(1, 2)
    return products * x.comparison.scale / (stop - start).clamp_min(1)


def _before(k: Float[Tensor, "b g k d"], run: int = 32) -> Float[Tensor, "b g n d"]:
    """The sum of all keys before each place, 0 before the first; at least K + 1 places.

    Runs of keys are added up by a triangular product: a plain cumsum along this axis would have a
    GPU walk each head's keys one by one."""
    padded = torch.nn.functional.pad(k, (0, 0, 1, -(k.shape[2] + 1) % run))
    inside: Tensor = k.new_ones(run, run).tril() @ padded.unflatten(2, (-1, run))
    whole = inside[..., -1, :].cumsum(2)
    inside[:, :, 1:] += whole[:, :, :-1, None]
    return inside.flatten(2, 3)
