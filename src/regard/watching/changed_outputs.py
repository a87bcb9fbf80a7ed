"""A watched model in which attention may be given another output than it computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from regard.backends.contract import SecondPass
from regard.inputs import AttentionInputs
from regard.traces import Trace
from regard.watching.choices import Layers
from regard.watching.watcher import Watch

Handle = Callable[[str, int, Trace], Tensor | None]
"""Takes the path of a module, which of its calls in the run it is, and that call. Gives the output
[B, H, Q, E] that is to be used instead of the call's own, if any."""


ColumnsOf = Callable[[str, int, AttentionInputs, SecondPass], Tensor | None]
"""Takes the same of a call that is about to run, and who answers questions about it. Gives numbers
of its keys [B, H, K, C] that are to be mixed by the same weights as the values, if any: where a
backend does so, `trace.rows` has them as `columns`."""


class Intervening(Watch):
    """A model whose calls are handed to a function. What was seen is not kept.

    Calls that run again, in gradient checkpointing, are handed to it again. When it ends, also by
    an exception, nothing of it stays in the model.
    """

    changes = True

    def __init__(
        self,
        model: nn.Module,
        handle: Handle,
        layers: Layers = None,
        columns: ColumnsOf | None = None,
    ) -> None:
        super().__init__(model, layers, None, "statistics", 1)
        self._handle, self._columns_of = handle, columns
        self.columns = None if columns is None else self._columns
        self._calls: Counter[str] = Counter()

    def see(self, trace: Trace) -> Tensor | None:
        if not self._running:
            return None
        path = self._caller()
        if not self._wanted(path):
            return None
        self.seen.layer(path)
        nth = self._calls[path]
        self._calls[path] += 1
        return self._handle(path, nth, trace)

    def _columns(self, call: AttentionInputs, asks: SecondPass) -> Tensor | None:
        if not self._running or self._columns_of is None:
            return None
        path = self._caller()
        nth = self._calls[path]
        return self._columns_of(path, nth, call, asks) if self._wanted(path) else None

    def _begin(self, *of: Any) -> None:
        self._calls.clear()
        super()._begin(*of)

    def _read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nobody asks which text was read."""
