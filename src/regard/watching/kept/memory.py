"""The memory of traces that are kept while a model runs: told of before it runs out."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from regard.errors import RegardWarning
from regard.seen import Weight
from regard.traces import Trace


class KeptMemory:
    """Warns once, and as soon as it can be known: after the first layer of the first run, if the
    others are like it."""

    def __init__(self, model: nn.Module, wanted: Callable[[str], bool]) -> None:
        self._model, self._wanted = model, wanted
        self._weight: Weight | None = Weight()
        self._alike: dict[str, int] = {}
        """How many layers are wanted that are like the one of a path."""

    def forget(self) -> None:
        """No trace is kept any more."""
        if self._weight is not None:
            self._weight = self._weight.emptied()

    def add(self, path: str, trace: Trace) -> None:
        """A trace of the layer of a path is kept."""
        if self._weight is None:
            return
        if path not in self._alike:
            modules = dict(self._model.named_modules())
            kind = type(modules[path])
            alike = [p for p, m in modules.items() if type(m) is kind]
            self._alike |= dict.fromkeys(alike, sum(map(self._wanted, alike)))
        found = self._weight.add(trace, self._alike[path])
        if found is not None:
            self._weight = None
            warnings.warn(
                f'keep="traces": {found}. Choose layers= or heads=, keep="statistics", or '
                'spill="run.regard", which writes traces to disk as they come',
                RegardWarning,
                stacklevel=2,
            )
