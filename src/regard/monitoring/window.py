"""The sums of a window of training steps, over the processes that train together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from regard.monitoring.reports import Heads
from regard.monitoring.telemetry import Readings, Telemetry

Paths = tuple[str, ...]
"""Layers that were read together."""


class Ranks:
    """The processes that train copies of the model."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self.group = group
        self._nothing: dict[str, Telemetry] = {}

    @property
    def many(self) -> bool:
        running = distributed.is_available() and distributed.is_initialized()
        return running and distributed.get_world_size(self.group) > 1

    @property
    def first(self) -> bool:
        return not self.many or distributed.get_rank(self.group) == 0

    def completed(self, found: Mapping[Paths, Readings]) -> dict[Paths, Readings]:
        """With layers that this rank has seen before and not now, be it that looking failed: all
        ranks speak of the same ones, or they would wait for each other for ever."""
        if not self.many:
            return dict(found)
        known = {path: (read, i) for paths, read in found.items() for i, path in enumerate(paths)}
        self._nothing |= {
            path: read.at(i).nothing()
            for path, (read, i) in known.items()
            if path not in self._nothing
        }
        missing = {path: t for path, t in self._nothing.items() if path not in known}
        return dict(found) | {(p,): Readings(t.stacked()[:, None]) for p, t in missing.items()}

    def largest(self, logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The largest of all ranks, so that all clip alike and stay equal."""
        return self._reduced(logits, distributed.ReduceOp.MAX) if self.many else dict(logits)

    def summed(self, found: Mapping[str, Telemetry]) -> dict[str, Telemetry]:
        if not self.many:
            return dict(found)
        largest = self.largest({path: t.statistics.max_logit for path, t in found.items()})
        stacked = {path: t.stacked().flatten() for path, t in found.items()}
        sums = self._reduced(stacked, distributed.ReduceOp.SUM)
        whole = {
            path: Telemetry.read(t.view(-1, len(found[path].room))) for path, t in sums.items()
        }
        return {
            path: replace(t, statistics=replace(t.statistics, max_logit=largest[path]))
            for path, t in whole.items()
        }

    def _reduced(self, parts: Mapping[str, Tensor], how: Any) -> dict[str, Tensor]:
        names = sorted(parts)
        whole = torch.cat([parts[name] for name in names])
        distributed.all_reduce(whole, how, self.group)
        each = whole.split([len(parts[name]) for name in names])
        return dict(zip(names, each, strict=True))


@dataclass(frozen=True)
class _Sums:
    looks: int
    found: Mapping[Paths, Readings]
    clipped: Mapping[str, Tensor]


class Window:
    """Sums since the last report, where the model is."""

    def __init__(self) -> None:
        self._sums = _Sums(0, {}, {})

    @property
    def looks(self) -> int:
        return self._sums.looks

    def add(self, found: Mapping[Paths, Readings], clipped: Mapping[str, Tensor]) -> None:
        """All of a step at once, or nothing if it is interrupted."""
        before = self._sums
        readings, times = dict(before.found), dict(before.clipped)
        for paths, new in found.items():
            readings[paths] = readings[paths].plus(new) if paths in readings else new
        for path, now in clipped.items():
            times[path] = times[path] + now if path in times else now
        self._sums = _Sums(before.looks + 1, readings, times)

    def heads(self, ranks: Ranks) -> dict[str, Heads]:
        """Of each layer; the only time that the device is waited for."""
        found, clipped = ranks.summed(by_path(self._sums.found)), self._sums.clipped
        rows = {
            path: torch.cat([t.stacked(), clipped.get(path, torch.zeros_like(t.room))[None]])
            for path, t in found.items()
        }
        return {
            path: Heads.of(Telemetry.read(here[:-1]), here[-1])
            for path, here in _on_host(rows).items()
        }


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
