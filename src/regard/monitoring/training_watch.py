"""Watching steps of training: more is taken of each call than plain watching pays for, and nothing
that goes wrong in it reaches the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.monitoring.logit_spread import HeadSpread
from regard.monitoring.ranks import Ranks
from regard.monitoring.telemetry import Readings, head_sums, kind
from regard.monitoring.troubles import Troubles
from regard.monitoring.window import Paths
from regard.traces import Trace
from regard.watching import Watch, uncompiled
from regard.watching.pytorch.deferred_calls import DeferredCalls, unchanged, versions

LOOKING = "looking at the model"
ONE_GRAPH = "a part of the model that attends is compiled with fullgraph=True, so it runs unseen"
WHOLE = "compile it without fullgraph=True to have it looked at, between graphs"
MANY = 2**27
"""So many bytes of calls, which training holds anyway, wait at most to be read together."""
T = TypeVar("T")


class _Unread(NamedTuple):
    """A call that waits to be read with others."""

    trace: Trace
    versions: tuple[int, ...]

    def unchanged(self) -> bool:
        """Whether what will be read of it is what it was."""
        x = self.trace.inputs
        return unchanged((x.q, x.k, self.trace.rows.out), self.versions)


class TrainingWatch(Watch):
    """Watches the runs of a model that have gradients."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] | None,
        troubles: Troubles,
        ranks: Ranks,
        *,
        walks: bool = False,
    ) -> None:
        super().__init__(model, layers, None, "statistics", 1)
        self._troubles, self._ranks = troubles, ranks
        self.measures = True
        """Whether the spread of logits is measured in the step that runs."""
        self._walks = walks
        self._deferred = DeferredCalls(self._look_at_deferred, self._missed)
        self._found: dict[Paths, Readings] = {}
        self._spreads: dict[str, HeadSpread] = {}
        self._calls: defaultdict[Hashable, list[tuple[str, _Unread]]] = defaultdict(list)
        """Calls that were not read yet, those of a kind together."""
        self._held = 0
        self._sums: defaultdict[Hashable, list[tuple[str, Tensor]]] = defaultdict(list)
        """What calls add up to, where that was asked of a backend at once: one launch each, so that
        nothing of a call waits but a few numbers, and the layers need be put together only once."""

    def taken(self) -> dict[Paths, Readings]:
        """What was found since it was asked last, of several layers together."""
        found, self._found = self._found, {}
        return found

    def taken_spreads(self) -> dict[str, HeadSpread]:
        """How far logits were from one another, by layers, where that was measured."""
        found, self._spreads = self._spreads, {}
        return found

    @property
    def attached(self) -> bool:
        return bool(self._modules)

    @property
    def ran(self) -> bool:
        return bool(self._gaps.ran)

    @property
    def attends(self) -> bool:
        """Whether something attended, seen or not."""
        gaps = self._gaps
        return bool(gaps.attended or gaps.left_alone or gaps.by_hand.found)

    def refuse_gaps(self) -> None:
        self._refuse_gaps()

    def _warn_of_gaps(self) -> None:
        """A monitor attaches and detaches all the time, and says so itself."""

    def wants(self, path: str) -> bool:
        return self._wanted(path)

    # Written out: this is gone through at every layer.

    @uncompiled
    def enter(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        compiled: bool = False,
    ) -> None:
        """A module begins to run. If that cannot be followed, the model is left alone."""
        try:
            super().enter(path, module, args, kwargs, compiled=compiled)
        except Exception as error:
            self._give_up(error)

    @uncompiled
    def leave(self, path: str, depth: int, output: Any) -> None:
        try:
            super().leave(path, depth, output)
        except Exception as error:
            self._give_up(error)

    @uncompiled
    def yields(self, error: Exception) -> bool:
        """A part of the model is compiled as one graph, in which nothing can be looked at."""
        if self._troubles.raises:
            return False
        self._leave_alone()
        self._troubles.note(LOOKING, RegardError(ONE_GRAPH, do=WHOLE))
        return True

    def beside(self, queries: int, keys: int) -> bool:
        """Of PyTorch's attention every call is traced, and every output its own: also where nothing
        is learned, as in frozen layers below others. What training gives must not depend on whether
        a step was looked at."""
        return True

    def see(self, trace: Trace) -> Tensor | None:
        with self._troubles.during(LOOKING):
            super().see(trace)
        return None

    def _give_up(self, error: Exception) -> None:
        self._leave_alone()
        if self._troubles.raises:
            raise error
        self._troubles.note(LOOKING, error)

    def _start(self, *, asks: bool) -> None:
        super()._start(asks=asks)
        if self._active is not None:
            self._active.spared = lambda: self._troubles.during(LOOKING)
            self._deferred.drop()
            self._active.deferred = self._deferred

    def _missed(self, path: str) -> None:
        # What is missing is no attention that was not seen.
        self._troubles.fresh = True
        self._troubles.remark(
            "overwritten",
            f"tensors of attention in {path or '(model)'} were written to or freed after it, so a "
            "call of it could not be looked at; from the next step on calls are looked at at once",
        )

    def _read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nobody asks which text was read, and to compare two would wait for the device."""

    def _due(self) -> bool:
        return torch.is_grad_enabled()

    def _take(self, path: str, trace: Trace) -> None:
        self.seen.layer(path)
        if path not in self._ranks.held:
            self._ranks.hold(path, self.model.get_submodule(path), trace)
        if self.measures:
            with self._troubles.during(LOOKING):
                spread = HeadSpread.of(trace, walk=self._walks)
                more = path in self._spreads
                self._spreads[path] = self._spreads[path].plus(spread) if more else spread
        sums = head_sums(trace)
        if sums is not None:
            self._sums[sums.shape, sums.device].append((path, sums))
            return
        alike = kind(trace) if self._deferred.wanted else None
        if alike is None:
            self._note((path,), Readings.of([trace]))
            return
        tensors = (trace.inputs.q, trace.inputs.k, trace.rows.out)
        self._calls[alike].append((path, _Unread(trace, versions(*tensors))))
        self._held += sum(t.numel() * t.element_size() for t in tensors)
        if self._held >= MANY:
            self._read()

    def _rest(self) -> None:
        self._read()
        added, self._sums = self._sums, defaultdict(list)
        with self._troubles.during(LOOKING):
            for several in added.values():
                for paths, sums in _once_each(several):
                    self._note(paths, Readings.of_sums(sums))

    def _read(self) -> None:
        """Read the calls that wait."""
        waited, self._calls, self._held = self._calls, defaultdict(list), 0
        with self._troubles.during(LOOKING):
            for several in waited.values():
                left = []
                for path, call in several:
                    if call.unchanged():
                        left.append((path, call.trace))
                    else:
                        self._deferred.miss(path)
                for paths, traces in _once_each(left):
                    self._note(paths, Readings.of(traces))

    def _note(self, paths: Paths, found: Readings) -> None:
        self._found[paths] = self._found[paths].plus(found) if paths in self._found else found


def _once_each(calls: list[tuple[str, T]]) -> Iterator[tuple[Paths, list[T]]]:
    """One call of each layer at a time, should some have run more often."""
    while calls:
        once: dict[str, T] = {}
        more = []
        for path, call in calls:
            if path in once:
                more.append((path, call))
            else:
                once[path] = call
        yield tuple(once), list(once.values())
        calls = more
