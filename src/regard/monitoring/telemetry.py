"""What training wants to know of each head, added up without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.biases.dense import Dense
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.seen import Looks, Span, Statistics, Sums, open_places, outline_of
from regard.traces import Trace


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
    def of(trace: Trace) -> Telemetry:
        """From one call."""
        return Readings.of([trace]).at(0)

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


class Readings(NamedTuple):
    """Telemetry of several layers in one tensor: on a card an operation takes longer to start than
    to run."""

    numbers: Float[Tensor, "n layers h"]
    """As `Telemetry.stacked` has them."""

    @staticmethod
    def of(traces: Sequence[Trace]) -> Readings:
        """From one call of each layer: a single one, or several of one `kind`."""
        sums: list[Tensor] = []
        for trace in traces:
            found = head_sums(trace)
            if found is None:
                return Readings.by_rows(traces)
            sums.append(found)
        return Readings.of_sums(sums)

    @staticmethod
    @torch.no_grad()
    def of_sums(sums: Sequence[Float[Tensor, "n b h"]]) -> Readings:
        """From the `head_sums` of one call of each layer."""
        each = torch.stack(list(sums), 1)
        numbers = each.sum(2)
        if each.shape[2]:
            torch.amax(each[LARGEST], 1, out=numbers[LARGEST])
        else:
            numbers[LARGEST] = -math.inf
        return Readings(numbers)

    @staticmethod
    @torch.no_grad()
    def by_rows(traces: Sequence[Trace]) -> Readings:
        """From what each row saw, by operations of PyTorch: as `of`."""
        layers, calls = len(traces), [trace.rows.plain() for trace in traces]
        x = _together([trace.inputs for trace in traces])
        with torch.autocast(x.q.device.type, enabled=False):
            looks = [Looks.of(trace) for trace in traces]
            max_logit, lse = (_cat([getattr(c, n) for c in calls]) for n in ("max_logit", "lse"))
            places = open_places(x)
            if isinstance(x.bias, Dense):
                # Rows that such a mask hides whole are empty. Each of these calls is read alone.
                max_logit = max_logit.masked_fill(places == int(x.sink is not None), -torch.inf)
                looks = [looks[0].reaching(max_logit)]
            sums = Sums.of(looks, layers)
            seeing = max_logit.isfinite()
            mean = _mean_logit_of_band(x)
            if mean is None:
                mean = traces[0].second_pass.mean_logit(x)
            room = places.to(lse.dtype).clamp_min(1).log().expand_as(lse)
            out = _cat([call.out for call in calls])
            size: Tensor = torch.linalg.vector_norm(out, dim=-1, dtype=lse.dtype)
            whole = size.isfinite()
            energy = size.square().div_(max(out.shape[-1], 1)).masked_fill_(~whole, 0.0)
            broken = ~(seeing | (max_logit == -torch.inf)) | ~whole

            def summed(t: Tensor) -> Tensor:
                found: Tensor = t.unflatten(-3, (layers, -1)).sum((-3, -1), dtype=lse.dtype)
                return found

            rows = torch.stack([mean, room, energy])
            added = summed(rows.masked_fill_(~seeing, 0.0))
            ill, empty, entropy, first = sums.counts
            sink = first
            if x.sink is not None:
                sinks = torch.stack([t.inputs.sink for t in traces if t.inputs.sink is not None])
                apart = sinks.to(lse.dtype)[:, None, :, None] - lse.unflatten(0, (layers, -1))
                more = summed(apart.exp().flatten(0, 1).masked_fill_(~seeing, 0.0))
                # Two roundings of large logits may add up to more than the rows have.
                sink = torch.minimum(sink + more, sums.rows - ill)
            every = torch.full_like(ill, sums.rows)
            told = (
                every, empty, ill - empty, sums.largest, entropy, first, added[0],
                added[1], sink, added[2], summed(broken), summed(max_logit == torch.inf),
            )  # fmt: skip
            return Readings(torch.stack(told))

    def plus(self, other: Readings) -> Readings:
        """With more calls of the same layers."""
        added = self.numbers + other.numbers
        torch.maximum(self.numbers[LARGEST], other.numbers[LARGEST], out=added[LARGEST])
        return Readings(added)

    @property
    def max_logit(self) -> Float[Tensor, "layers h"]:
        return self.numbers[LARGEST]

    def at(self, place: int) -> Telemetry:
        """Of one of the layers."""
        return Telemetry.read(self.numbers[:, place])


LARGEST = [field.name for field in fields(Statistics)].index("max_logit")
"""Which of the numbers is no sum."""


def head_sums(trace: Trace) -> Float[Tensor, "n b h"] | None:
    """What `Readings` are made of, where a backend adds it up by itself."""
    return trace.second_pass.head_sums(trace.inputs, trace.rows.plain())


def kind(trace: Trace) -> Hashable | None:
    """Calls of one kind can be read together; None for one that has to be read by itself."""
    x = trace.inputs
    outline = outline_of(x.mask)
    plain = type(x.comparison) is Dot and x.bias is None and x.softcap is None
    if not plain or outline is None or not x.q.numel() or not x.k.numel():
        return None
    assert isinstance(x.comparison, Dot)
    # Masks that hold numbers are one if they were given as one.
    given = id(trace.mask) if outline.columns else None
    rows, sink = trace.rows, None if x.sink is None else x.sink.dtype
    return (
        x.q.shape, x.k.shape, rows.out.shape, x.q.dtype, rows.out.dtype, x.q.device,
        outline.band, given, sink, x.comparison.scale,
    )  # fmt: skip


def _together(calls: Sequence[AttentionInputs]) -> AttentionInputs:
    """Calls of one kind as one with a larger batch."""
    if len(calls) == 1:
        return as_masked(calls[0])
    q, k = (torch.cat([getattr(x, name) for x in calls]) for name in ("q", "k"))
    # Values are in the outputs already; keys stand in for them.
    return replace(calls[0], q=q, k=k, v=k)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def as_masked(x: AttentionInputs) -> AttentionInputs:
    """The same call, with minus infinity in a float mask that holds other numbers in its place."""
    if not isinstance(x.bias, Dense):
        return x
    return replace(x, bias=Dense(x.bias.tensor.masked_fill(~x.bias.shown(), -torch.inf)))


def _mean_logit_of_band(x: AttentionInputs) -> Float[Tensor, "b h q"] | None:
    """The mean of q·k over keys is q·(the mean of keys), which prefix sums give for every band in
    O(n), padded or not. None where logits are more than scaled products, or the mask is other.

    Keys that are not finite count as 0: who sees them is not asked for a mean."""
    outline = outline_of(x.mask)
    plain = isinstance(x.comparison, Dot) and x.bias is None and x.softcap is None
    if outline is None or not plain or not x.shape.K:
        return None
    assert isinstance(x.comparison, Dot)
    band, span = outline.band, Span.of(outline, x)
    k = x.k.to(x.compute_dtype).nan_to_num(0.0, 0.0, 0.0)
    if span.real is not None:
        k = k.mul_(span.real[:, None, :, None])
    if band == (-math.inf, math.inf):
        total = k.sum(2, keepdim=True)
    else:
        before = _before(k)
        to = max(min(band[1], x.shape.K), -x.shape.Q) + 1
        # Most often queries stand where keys do, and a slice of them needs no copy.
        inside = 0 <= to <= x.shape.K + 1 - x.shape.Q
        total = before[:, :, int(to) :][:, :, : x.shape.Q] if inside else before[:, :, span.stop]
        if band[0] > -x.shape.Q:
            total = total - before[:, :, span.start]
    q = x.q.unflatten(1, (-1, x.group))
    products: Tensor = (q * total[:, :, None]).sum(-1).flatten(1, 2)
    return products * x.comparison.scale / span.many.clamp_min(1)


def _before(k: Float[Tensor, "b g k d"], run: int = 32) -> Float[Tensor, "b g n d"]:
    """The sum of all keys before each place, 0 before the first; at least K + 1 places.

    Runs of keys are added up by a triangular product: a plain cumsum along this axis would have a
    GPU walk each head's keys one by one."""
    padded = torch.nn.functional.pad(k, (0, 0, 1, -(k.shape[2] + 1) % run))
    inside: Tensor = k.new_ones(run, run).tril() @ padded.unflatten(2, (-1, run))
    whole = inside[..., -1, :].cumsum(2)
    inside[:, :, 1:] += whole[:, :, :-1, None]
    return inside.flatten(2, 3)
