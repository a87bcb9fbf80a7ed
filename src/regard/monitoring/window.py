"""The sums of a window of training steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.monitoring.logit_spread import HeadSpread
from regard.monitoring.ranks import Ranks, Totals
from regard.monitoring.reports import Heads
from regard.monitoring.telemetry import Readings, Telemetry

Paths = tuple[str, ...]
"""Layers that were read together."""


@dataclass(frozen=True)
class _Sums:
    looks: int
    found: Mapping[Paths, Readings]
    clipped: Mapping[str, Tensor]
    spreads: Mapping[str, HeadSpread]


class Window:
    """Sums since the last report, where the model is."""

    def __init__(self) -> None:
        self._sums = _Sums(0, {}, {}, {})

    @property
    def looks(self) -> int:
        return self._sums.looks

    def add(
        self,
        found: Mapping[Paths, Readings],
        clipped: Mapping[str, Tensor],
        spreads: Mapping[str, HeadSpread],
    ) -> None:
        """All of a step at once, or nothing if it is interrupted."""
        before = self._sums
        readings, times = dict(before.found), dict(before.clipped)
        for paths, new in found.items():
            readings[paths] = readings[paths].plus(new) if paths in readings else new
        for path, now in clipped.items():
            times[path] = times[path] + now if path in times else now
        # They are measured in one step of a window.
        spread = {**before.spreads, **spreads}
        self._sums = _Sums(before.looks + bool(found), readings, times, spread)

    def heads(self, ranks: Ranks) -> tuple[int, dict[str, Heads]]:
        """How often ranks looked, and what they saw of each layer; the only time that the device is
        waited for."""
        own, clipped = by_path(self._sums.found), self._sums.clipped
        spreads = {
            path: self._sums.spreads.get(path, HeadSpread.nothing(t.room))
            for path, t in own.items()
        }

        def largest(path: str, t: Telemetry) -> Tensor:
            cut = torch.zeros_like(t.room)
            if path in clipped:
                cut = ranks.own_heads(path, clipped[path])
            return torch.stack([t.statistics.max_logit, cut, -spreads[path].lowest])

        found = ranks.together(
            Totals(
                self.looks,
                {path: largest(path, t) for path, t in own.items()},
                {
                    path: torch.cat([t.stacked(), torch.stack(spreads[path][:2])])
                    for path, t in own.items()
                },
            )
        )
        rows = {path: torch.cat([t, found.sums[path]]) for path, t in found.largest.items()}
        return found.looks, {path: _heads(here) for path, here in _on_host(rows).items()}


def _heads(numbers: Tensor) -> Heads:
    """From the largest numbers of a layer, and its sums."""
    max_logit, clipped, highest = numbers[:3]
    variance, choosing = numbers[-2:]
    spread = HeadSpread(variance, choosing, -highest)
    return Heads.of(_with_largest(Telemetry.read(numbers[3:-2]), max_logit), clipped, spread)


def _with_largest(t: Telemetry, max_logit: Tensor) -> Telemetry:
    return replace(t, statistics=replace(t.statistics, max_logit=max_logit))


def by_path(found: Mapping[Paths, Readings]) -> dict[str, Telemetry]:
    """The telemetry of each layer, from what was read of several together."""
    each: dict[str, Telemetry] = {}
    for paths, readings in found.items():
        for i, path in enumerate(paths):
            new = readings.at(i)
            each[path] = each[path] + new if path in each else new
    return each


def _on_host(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, made with one wait for each device."""
    there: dict[torch.device, list[str]] = {}
    for name, t in parts.items():
        there.setdefault(t.device, []).append(name)
    found: dict[str, Tensor] = {}
    for names in there.values():
        flat = torch.cat([parts[name].double().flatten() for name in names]).cpu()
        each = flat.split([parts[name].numel() for name in names])
        found |= {n: t.view_as(parts[n]) for n, t in zip(names, each, strict=True)}
    return {name: found[name] for name in parts}
