"""Watching steps of training: more is taken of each call than plain watching pays for, and nothing
that goes wrong in it reaches the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.monitoring.qk_clip import Kind
from regard.monitoring.telemetry import Readings, kind
from regard.monitoring.troubles import Troubles
from regard.monitoring.window import Paths
from regard.traces import Trace
from regard.watching import Watch, uncompiled

LOOKING = "looking at the model"
MANY = 2**27
"""So many bytes of calls, which training holds anyway, wait at most to be read together."""


class TrainingWatch(Watch):
    """Watches the runs of a model that have gradients."""

    def __init__(self, model: nn.Module, layers: Sequence[str] | None, troubles: Troubles) -> None:
        super().__init__(model, layers, None, "statistics", 1)
        self._troubles = troubles
        self._found: dict[Paths, Readings] = {}
        self._kinds: dict[str, Kind] = {}
        self._calls: defaultdict[Hashable, list[tuple[str, Trace]]] = defaultdict(list)
        """Calls that were not read yet, those of a kind together."""
        self._held = 0

    def taken(self) -> tuple[dict[Paths, Readings], dict[str, Kind]]:
        """What was found since it was asked last, of several layers together, and the kinds of
        calls."""
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

    @uncompiled
    def enter(self, *args: Any, **options: Any) -> None:
        """A module begins to run. If that cannot be followed, the model is left alone."""
        self._or_leave_alone(super().enter, *args, **options)

    @uncompiled
    def leave(self, *args: Any, **options: Any) -> None:
        self._or_leave_alone(super().leave, *args, **options)

    def see(self, trace: Trace) -> Tensor | None:
        with self._troubles.during(LOOKING):
            super().see(trace)
        return None

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

    def _read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nobody asks which text was read, and to compare two would wait for the device."""

    def _due(self) -> bool:
        return torch.is_grad_enabled()

    def _take(self, path: str, trace: Trace) -> None:
        self.seen.layer(path)
        if path not in self._kinds:
            self._kinds[path] = Kind.of(trace)
        alike = kind(trace)
        if alike is None:
            self._read([(path, trace)])
            return
        self._calls[alike].append((path, trace))
        tensors = (trace.inputs.q, trace.inputs.k, trace.rows.out)
        self._held += sum(t.numel() * t.element_size() for t in tensors)
        if self._held >= MANY:
            self._rest()

    def _rest(self) -> None:
        """Read the calls that wait."""
        waited, self._calls, self._held = self._calls, defaultdict(list), 0
        with self._troubles.during(LOOKING):
            for calls in waited.values():
                while calls:
                    # One call of each layer, should some have run more often.
                    once = dict(reversed(calls))
                    some = [(path, trace) for path, trace in calls if once.get(path) is trace]
                    calls = [call for call in calls if once.get(call[0]) is not call[1]]
                    self._read(some)

    def _read(self, calls: Sequence[tuple[str, Trace]]) -> None:
        paths = tuple(path for path, _ in calls)
        found = Readings.of([trace for _, trace in calls])
        self._found[paths] = self._found[paths].plus(found) if paths in self._found else found
