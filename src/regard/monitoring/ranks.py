"""The processes that train a model together, and what they tell each other: one sum and one maximum
for a window, and one more maximum for a step in which QK-clip looks.

Ranks need not hold the same. Each puts what it saw where the whole model has it, layer by layer and
head by head, beside zeros, or minus infinity, for what it does not hold: other stages of a
pipeline, other heads of tensor parallelism. Who holds what is told once, in a layout. A rank that
sees a layer of its own that the layout lacks says so in the window's maximum, and all make a new
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from regard.errors import RegardError
from regard.monitoring.projections import HeadShare
from regard.monitoring.qk_clip import Kind
from regard.monitoring.telemetry import Telemetry
from regard.seen import Statistics
from regard.traces import Trace


class Held(NamedTuple):
    """What a rank says of a layer that it holds."""

    kind: Kind
    share: HeadShare
    device: str
    double: bool


class Place(NamedTuple):
    """Where a layer's heads are among all."""

    start: int
    first: int
    """The first head of the layer that any rank here holds."""
    many: int
    total: int
    kind: Kind


class Layout(NamedTuple):
    """The layers and heads of all ranks, side by side."""

    places: dict[str, Place]
    width: int
    device: str
    dtype: torch.dtype

    @staticmethod
    def of(told: Sequence[Mapping[str, Held]]) -> Layout:
        """From what each rank holds. All come to the same, or to the same refusal."""
        places: dict[str, Place] = {}
        start = 1
        for path in sorted({path for held in told for path in held}):
            here = [held[path] for held in told if path in held]
            if len({(one.share.total, one.kind.width) for one in here}) > 1:
                raise RegardError(
                    "ranks disagree about a layer",
                    got=f"{path or '(model)'} with {[one.share.total for one in here]} heads of "
                    f"width {[one.kind.width for one in here]}",
                    accepted="the same layer under the same path on all ranks",
                    do="name the ranks that hold the same model: Monitor(group=...)",
                )
            first = min(one.share.first for one in here)
            many = max(one.share.first + one.share.many for one in here) - first
            trouble = next((one.kind.trouble for one in here if one.kind.trouble), "")
            total = here[0].share.total
            kind = Kind(total, here[0].kind.width, trouble)
            places[path] = Place(start, first, many, total, kind)
            start += many
        every = [one for held in told for one in held.values()]
        device = max((one.device for one in every), key=lambda name: name != "cpu", default="cpu")
        dtype = torch.float64 if any(one.double for one in every) else torch.float32
        return Layout(places, start, device, dtype)


class Totals(NamedTuple):
    """What a window adds up to, by layers: numbers whose maximum counts, and those that are
    summed."""

    looks: int
    largest: Mapping[str, Float[Tensor, "n h"]]
    sums: Mapping[str, Float[Tensor, "m h"]]


OF_LARGEST = 3
OF_SUMS = len(fields(Statistics)) + len(fields(Telemetry)) - 1 + 2
"""How many numbers there are of each for a head: a rank without layers cannot tell from its own."""


class Ranks:
    """The processes of a group, all by default; one alone where torch.distributed does not run."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self.group = group
        self.held: dict[str, Held] = {}
        """The layers that were seen here."""
        self._layout: Layout | None = None
        self._told: dict[str, HeadShare] = {}

    @property
    def many(self) -> bool:
        running = distributed.is_available() and distributed.is_initialized()
        return running and distributed.get_world_size(self.group) > 1

    @property
    def first(self) -> bool:
        return not self.many or distributed.get_rank(self.group) == 0

    @property
    def kinds(self) -> dict[str, Kind]:
        """Of all layers that any rank holds, with all heads of each."""
        if self._layout is None:
            return {path: held.kind for path, held in self.held.items()}
        return {path: place.kind for path, place in self._layout.places.items()}

    def hold(self, path: str, module: nn.Module, trace: Trace) -> None:
        """A layer is seen here for the first time, while it runs."""
        kind, lse = Kind.of(trace), trace.rows.plain().lse
        share = HeadShare(0, kind.heads, kind.heads)
        if self.many:
            sure = self.group is not None
            share = HeadShare.of(path, module, kind.heads, kind.width, sure=sure)
        self.held[path] = Held(kind, share, lse.device.type, lse.dtype == torch.float64)

    def owns(self, path: str, model: nn.Module) -> bool:
        """Whether a layer is here, seen or not."""
        if path in self.held:
            return True
        try:
            model.get_submodule(path)
        except AttributeError:
            return False
        return True

    def own_heads(self, path: str, heads: Float[Tensor, "all"]) -> Float[Tensor, "h"]:
        """Those of a layer's heads that were seen here."""
        share = self.held[path].share
        return heads[share.first : share.first + share.many]

    def largest(self, logits: Mapping[str, Float[Tensor, "h"]]) -> dict[str, Tensor]:
        """The largest of all ranks, so that all decide alike. Nobody waits for a device; layers
        that are new are left out until the window ends."""
        if not self.many:
            return dict(logits)
        if self._layout is None:
            self._agree()
        whole = self._packed({path: t[None] for path, t in logits.items()}, 1, -torch.inf)
        distributed.all_reduce(whole, distributed.ReduceOp.MAX, self.group)
        return {path: t[0] for path, t in self._unpacked(whole).items()}

    def together(self, own: Totals) -> Totals:
        """What all ranks saw in a window."""
        if not self.many:
            return own
        if self._layout is None:
            self._agree()
        while True:
            lacking = self._told != self._shares()
            largest = self._packed(own.largest, OF_LARGEST, -torch.inf)
            largest[0, 0], largest[1, 0] = float(lacking), own.looks
            sums = self._packed(own.sums, OF_SUMS, 0.0)
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, self.group)
            distributed.all_reduce(sums, distributed.ReduceOp.SUM, self.group)
            lacks, looks = largest[:2, 0].tolist()
            if not lacks:
                return Totals(int(looks), self._unpacked(largest), self._unpacked(sums))
            self._agree()

    def whole_layer(self, path: str, heads: Float[Tensor, "h"]) -> Float[Tensor, "all"]:
        """With minus infinity for heads that no rank here holds."""
        if self._layout is None:
            return heads
        place = self._layout.places[path]
        after = place.total - place.first - place.many
        return torch.nn.functional.pad(heads, (place.first, after), value=-torch.inf)

    def _agree(self) -> None:
        told: list[Any] = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(told, self.held, group=self.group)
        self._told = self._shares()
        self._layout = Layout.of(told)

    def _shares(self) -> dict[str, HeadShare]:
        return {path: held.share for path, held in self.held.items()}

    def _packed(self, parts: Mapping[str, Tensor], count: int, nothing: float) -> Tensor:
        assert self._layout is not None
        layout = self._layout
        where = next((t.device for t in parts.values()), torch.device(layout.device))
        if where.type != layout.device:
            where = torch.device(layout.device)
        whole = torch.full((count, layout.width), nothing, dtype=layout.dtype, device=where)
        for path, t in parts.items():
            if path in layout.places:
                place, share = layout.places[path], self.held[path].share
                start = place.start + share.first - place.first
                whole[:, start : start + share.many] = t
        return whole

    def _unpacked(self, whole: Tensor) -> dict[str, Tensor]:
        assert self._layout is not None
        return {
            path: whole[:, place.start : place.start + place.many]
            for path, place in self._layout.places.items()
        }
