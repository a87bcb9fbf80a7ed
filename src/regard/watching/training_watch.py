"""Watching steps of training: more is taken of each call than plain watching pays for, and nothing
that goes wrong in it reaches the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from regard.traces import Trace
from regard.watching.qk_clip import Kind
from regard.watching.statistics import Statistics
from regard.watching.telemetry import Telemetry
from regard.watching.troubles import Troubles
from regard.watching.watcher import Watch

LOOKING = "looking at the model"


class TrainingWatch(Watch):
    """Watches the runs of a model that have gradients."""

    def __init__(self, model: nn.Module, layers: Sequence[str] | None, troubles: Troubles) -> None:
        super().__init__(model, layers, None, "statistics", 1)
        self._troubles = troubles
        self._found: dict[str, Telemetry] = {}
        self._kinds: dict[str, Kind] = {}

    def taken(self) -> tuple[dict[str, Telemetry], dict[str, Kind]]:
        """What was found since it was asked last, and the kinds of calls."""
        found, self._found = self._found, {}
        return found, self._kinds

    @property
    def attached(self) -> bool:
        return bool(self._followed)

    @property
    def ran(self) -> bool:
        return bool(self._ran)

    def refuse_gaps(self) -> None:
        self._refuse_gaps()

    def wants(self, path: str) -> bool:
        return self._wanted(path)

    def enter(self, *args: Any, **options: Any) -> None:
        """A module begins to run. If that cannot be followed, the model is left alone."""
        self._or_leave_alone(super().enter, *args, **options)

    def leave(self, *args: Any, **options: Any) -> None:
        self._or_leave_alone(super().leave, *args, **options)

    def see(self, trace: Trace) -> None:
        with self._troubles.during(LOOKING):
            super().see(trace)

    def _or_leave_alone(self, follow: Callable[..., None], *args: Any, **options: Any) -> None:
        try:
            follow(*args, **options)
        except Exception as error:
            self._leave_alone()
            if self._troubles.raises:
                raise
            self._troubles.note(LOOKING, error)

    def _start(self, *, asks: bool) -> None:
        super()._start(asks=asks)
        if self._active is not None:
            self._active.spared = lambda: self._troubles.during(LOOKING)

    def _due(self) -> bool:
        return torch.is_grad_enabled()

    def _take(self, path: str, trace: Trace) -> None:
        self.seen.layer(path)
        found = Telemetry.of(trace, Statistics.of(trace))
        self._found[path] = self._found[path] + found if path in self._found else found
        if path not in self._kinds:
            self._kinds[path] = Kind.of(trace)
