"""A Cost: what a call, a layer or a model takes. Nothing is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from regard.cost.cache import CacheBytes, Decoding
from regard.cost.call_memory import Memory
from regard.cost.configuration import Configuration
from regard.cost.devices import device as find_device
from regard.cost.parts import Count, Counts, Part, Step
from regard.cost.rates import Device
from regard.cost.tables import Block, as_html, as_text
from regard.cost.units import counted, sized, timed
from regard.errors import RegardError

How = Literal["fused", "eager"]


class Bound(NamedTuple):
    """The least time that a device's peaks allow."""

    seconds: float
    by: Literal["arithmetic", "memory"]


@dataclass(frozen=True)
class Cost:
    """What `regard.cost.call`, `layer` and `model` found. Prints as a table, and is
    one in a notebook."""

    name: str
    what: str
    """The sizes in words."""
    tokens: int
    """Queries of all sequences together."""
    dtype: str
    parts: tuple[Part, ...]
    eager: Memory
    fused: Memory
    tile: tuple[int, int]
    weights: int = 0
    """Bytes of all matrices."""
    cache: CacheBytes | None = None
    decoding: Decoding | None = None
    device: Device | None = None
    configuration: Configuration | None = None
    notes: tuple[str, ...] = ()

    def part(self, name: str) -> Part:
        """One part by name."""
        for part in self.parts:
            if part.name == name:
                return part
        raise RegardError(
            "there is no such part",
            got=repr(name),
            accepted=", ".join(part.name for part in self.parts),
        )

    def flops(self, count: Count = "needed", step: Step = "forward") -> int:
        """FLOPs of all parts, one MAC counted as two.

        `needed` counts the pairs that the mask allows, `executed` those of the tiles that a fused
        kernel visits (which computes scores a second time in a backward pass), `dense` all.
        """
        return sum(part.flops(count, step) for part in self.parts)

    @property
    def macs(self) -> Counts:
        """MACs of a forward pass, as textbooks count."""
        total = Counts(0, 0, 0)
        for part in self.parts:
            total = total.plus(part.macs)
        return total

    def bytes_moved(self, how: How = "fused", step: Step = "forward") -> int:
        """Bytes between memory and processor, if every operand is read once."""
        return sum(part.moved(how, step) for part in self.parts)

    def intensity(self, how: How = "fused") -> float:
        """FLOPs of a forward pass for each byte moved."""
        count: Count = "executed" if how == "fused" else "dense"
        return self.flops(count) / max(self.bytes_moved(how), 1)

    def time(
        self, device: str | Device | None = None, how: How = "fused", step: Step = "forward"
    ) -> Bound:
        """The roofline: each part takes as long as its arithmetic or its bytes, whichever is more.

        Fused, scores and weighted sum are one kernel, so they share both.
        """
        on = self._on(device)
        rate, bandwidth = on.rate(self.dtype), on.bandwidth
        count: Count = "executed" if how == "fused" else "dense"
        kernels: dict[str, list[Part]] = {}
        for part in self.parts:
            one = part.pairwise and how == "fused"
            kernels.setdefault("attention" if one else part.name, []).append(part)
        total = bound_by_memory = 0.0
        for parts in kernels.values():
            computing = sum(p.flops(count, step) for p in parts) / rate
            moving = sum(p.moved(how, step) for p in parts) / bandwidth
            total += max(computing, moving)
            bound_by_memory += moving if moving > computing else 0.0
        return Bound(total, "memory" if bound_by_memory > total / 2 else "arithmetic")

    def decode_time(self, device: str | Device | None = None) -> Bound:
        """The least time of a step that writes one token for each sequence."""
        if self.decoding is None:
            raise RegardError(
                f"{self.name} has no decoding: only models have", do="use regard.cost.model"
            )
        on = self._on(device)
        computing = self.decoding.flops / on.rate(self.dtype)
        moving = self.decoding.bytes_moved / on.bandwidth
        return Bound(max(computing, moving), "memory" if moving > computing else "arithmetic")

    def tokens_per_second(self, device: str | Device | None = None) -> float:
        """The most tokens that can be written in a second, over the whole batch."""
        seconds = self.decode_time(device).seconds
        assert self.decoding is not None
        return self.decoding.batch / seconds

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and words."""
        steps: tuple[Step, ...] = ("forward", "backward", "training")
        counts: tuple[Count, ...] = ("needed", "executed", "dense")
        found: dict[str, Any] = {
            "name": self.name,
            "what": self.what,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "flops_per_mac": 2,
            "tile": list(self.tile),
            "macs": self.macs._asdict(),
            "flops": {s: {c: self.flops(c, s) for c in counts} for s in steps},
            "parts": {part.name: part.as_dict() for part in self.parts},
            "memory": {"eager": self.eager._asdict(), "fused": self.fused._asdict()},
            "bytes_moved": {how: self.bytes_moved(how) for how in ("eager", "fused")},
            "intensity": {how: self.intensity(how) for how in ("eager", "fused")},
            "weights": self.weights,
            "cache": None if self.cache is None else self.cache._asdict(),
            "decoding": None if self.decoding is None else self.decoding.as_dict(),
            "notes": list(self.notes),
        }
        if self.device is not None:
            found["device"] = self.device.as_dict() | {
                "seconds": {how: self.time(how=how).seconds for how in ("eager", "fused")},
                "training_seconds": self.time(step="training").seconds,
            }
            if self.decoding is not None:
                found["device"]["tokens_per_second"] = self.tokens_per_second()
        return found

    def json(self) -> str:
        """Everything, as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        return as_text(self.what, _blocks(self), _notes(self))

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return as_html(self.what, _blocks(self), _notes(self))

    def _on(self, name: str | Device | None) -> Device:
        found = self.device if name is None else find_device(name)
        if found is None:
            raise RegardError(
                "a time needs a device", do='name one: device="H100 SXM", or "here" if measured'
            )
        return found


def _blocks(cost: Cost) -> list[Block]:
    found = (_work(cost), _memory(cost), _cache(cost), _roofline(cost))
    return [block for block in found if block is not None]


def _work(cost: Cost) -> Block:
    total = max(cost.flops("needed"), 1)
    rows = [["forward pass", "MACs", "FLOPs: needed", "executed", "dense", "share"]]
    rows += [
        [
            part.name,
            counted(part.macs.dense),
            *(counted(part.flops(c)) for c in ("needed", "executed", "dense")),
            f"{part.flops('needed') / total:.1%}",
        ]
        for part in cost.parts
    ]
    after = len(rows)
    steps: tuple[tuple[str, Step], ...] = (
        ("forward", "forward"), ("backward", "backward"), ("training step", "training")
    )  # fmt: skip
    for label, step in steps:
        macs = counted(cost.macs.dense) if step == "forward" else ""
        flops = [counted(cost.flops(c, step)) for c in ("needed", "executed", "dense")]
        rows.append([label, macs, *flops, "100.0%" if step == "forward" else ""])
    return Block(rows, (1, after))


def _memory(cost: Cost) -> Block:
    moved = [sized(cost.bytes_moved(how)) for how in ("eager", "fused")]
    layers = cost.configuration is not None
    rows = [
        ["memory", "eager", "fused"],
        ["bytes moved, forward", *moved],
        ["FLOPs for each byte", *(_ratio(cost.intensity(how)) for how in ("eager", "fused"))],
        [
            "most held by attention" + (" (one layer)" if layers else ""),
            *(sized(m.peak) for m in (cost.eager, cost.fused)),
        ],
        [
            "kept for backward" + (" (all layers)" if layers else ""),
            *(sized(m.kept) for m in (cost.eager, cost.fused)),
        ],
    ]
    return Block(rows, (1,))


def _ratio(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _cache(cost: Cost) -> Block | None:
    if cost.cache is None:
        return None
    rows = [
        ["weights", sized(cost.weights)],
        ["cache, one token", sized(cost.cache.per_token)],
        ["cache, this context", sized(cost.cache.in_context)],
    ]
    return Block(rows)


def _roofline(cost: Cost) -> Block | None:
    if cost.device is None:
        return None
    device = cost.device
    peaks = f"{counted(device.rate(cost.dtype))}FLOP/s, {counted(device.bandwidth)}B/s"
    ridge = f"ridge {_ratio(device.ridge(cost.dtype))} FLOPs a byte"
    rows = [[f"at best on {device.name}", f"{peaks}; {ridge}"]]
    for label, (seconds, by) in (
        ("forward, fused", cost.time()),
        ("forward, eager", cost.time(how="eager")),
        ("training step, fused", cost.time(step="training")),
    ):
        rows.append([label, f"{timed(seconds)}, bound by {by}"])
    if cost.decoding is not None:
        each = cost.decode_time()
        rate = cost.tokens_per_second()
        rows.append(["decoding", f"{rate:,.1f} tokens/s, bound by {each.by}"])
        if device.memory is not None and cost.cache is not None:
            need = cost.weights + cost.cache.in_context
            fits = "fits" if need <= device.memory else "does not fit"
            rows.append(["weights and cache", f"{sized(need)}: {fits} in {sized(device.memory)}"])
    return Block(rows, (1,), words=True)


def _notes(cost: Cost) -> list[str]:
    tile = "×".join(map(str, cost.tile))
    text = (
        "One MAC is two FLOPs; MACs are of all pairs, as in textbooks. needed: pairs that the mask "
        f"allows; executed: tiles of {tile} that hold one; dense: all. share: of what is needed."
    )
    return [*cost.notes, text]
