"""A watched model whose calls are handed to a function one by one, and not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from regard.errors import RegardError
from regard.traces import Trace
from regard.watching.choices import Layers
from regard.watching.watcher import Watch

Show = Callable[[str, int, Trace], None]
"""Takes the path of a module, the run of the model, from 0, and a call."""
Fits = Callable[[int, int], bool]
"""Whether calls of so many queries and keys are of interest."""


class Observer(Watch):
    """A model whose calls are shown to a function as they are made.

    The model never waits for a second opinion: where it calls PyTorch's attention, PyTorch's answer
    is used as it is, and what does not fit is not traced. A refusal by the function ends the
    looking, not the run; the end of the `with` raises it.
    """

    accepted = mend = ""
    """What is said where no call fits."""

    def __init__(self, model: nn.Module, show: Show, fits: Fits, layers: Layers = None) -> None:
        super().__init__(model, layers, None, "statistics", 1)
        self._show, self._fits = show, fits
        self._refused: RegardError | None = None
        self._sizes: dict[tuple[int, int], str] = {}
        """Of the calls that did not fit, each with a module that made such a call."""

    def beside(self, queries: int, keys: int) -> bool:
        path = self._running[-1]
        self._gaps.attended.add(path)
        return self._fitting(path, queries, keys)

    def _fitting(self, path: str, queries: int, keys: int) -> bool:
        """Whether a call is to be shown. What was named always is, and may be refused there."""
        if not self._wanted(path):
            return False
        if self.layers is None and not self._fits(queries, keys):
            self._sizes.setdefault((queries, keys), path)
            return False
        return True

    def see(self, trace: Trace) -> Tensor | None:
        if not self._running or self._refused is not None:
            return None
        path = self._caller()
        shape = trace.inputs.shape
        if self._fitting(path, shape.Q, shape.K):
            self.seen.layer(path)
            try:
                self._show(path, self._runs - 1, trace.detach())
            except RegardError as error:
                self._refused = error
        return None

    def _refuse_gaps(self) -> None:
        if self._refused is not None:
            raise self._refused
        if self._sizes and not self.seen:
            sizes = [f"{q} queries over {k} keys ({p})" for (q, k), p in self._sizes.items()]
            raise RegardError(
                "attention was seen, but none of the kind that was asked for",
                got="; ".join(sizes[:6]) + ("; …" if len(sizes) > 6 else ""),
                accepted=self.accepted,
                do=self.mend,
            )
        super()._refuse_gaps()

    def _read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nobody asks which text was read."""
