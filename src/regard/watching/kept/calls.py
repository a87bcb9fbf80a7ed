"""What is kept of the calls that are seen: statistics or traces, in memory or in a file, and the
tokens that they are of."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from regard.seen import Seen, Waiting
from regard.trace_files import Spill, Spilled
from regard.traces import Trace
from regard.watching.choices import Keep
from regard.watching.kept.memory import KeptMemory
from regard.watching.kept.tensors import KeptTensors
from regard.watching.tokens import Reading


class KeptCalls:
    """The calls of a model's layers, as `seen` has them."""

    def __init__(
        self,
        model: nn.Module,
        wanted: Callable[[str], bool],
        keep: Keep,
        spill: str | os.PathLike[str] | None,
        tokenizer: Any,
    ) -> None:
        self.seen = Seen(type(model).__name__)
        self._keep = keep
        self._reading = Reading(tokenizer)
        self.seen.tokens = self._reading.tokens
        self._spill = None if spill is None else Spill(spill)
        in_memory = keep == "traces" and spill is None
        self._memory = KeptMemory(model, wanted) if in_memory else None
        self._tensors = KeptTensors() if in_memory else None
        self._waiting = Waiting()

    def start(self, model: nn.Module) -> Callable[[], None]:
        """Calls may come, and tokens. Gives what ends the listening for the latter."""
        if self._spill is not None:
            self._spill.start()
        return self._reading.listen(model)

    def read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which text a run reads, and which step of it the run is: what traces are told apart
        by."""
        if self._keep == "statistics" and self._reading.tokenizer is None:
            return
        if not self.seen:
            self._reading.forget()
            if self._memory is not None:
                self._memory.forget()
        self._reading.begin(args, kwargs)

    def take(self, path: str, trace: Trace, run: int, *, held: bool) -> None:
        """Keep a call of the layer of a path. `held` says whether autograd holds its tensors."""
        layer = self.seen.layer(path)
        if self._spill is not None and not isinstance(layer.traces, Spilled):
            layer.traces = Spilled(self._spill, path)
        step = self._reading.step
        lasts = self._tensors is not None
        if self._tensors is not None:
            trace = self._tensors.lasting(trace, held=held)
        layer.take(
            trace, run, step, keep=lasts or self._spill is not None, waiting=self._waiting,
            lasts=lasts,
        )  # fmt: skip
        if self._memory is not None:
            self._memory.add(path, trace)

    def rest(self) -> None:
        """A run is over."""
        self._waiting.rest()

    def forget_shared(self) -> None:
        """What the calls of a run share is not looked for in those of the next."""
        if self._spill is not None:
            self._spill.forget_shared()

    def settle(self) -> None:
        """Add up what waits to be."""
        self._waiting.settle()

    def finish(self) -> None:
        """Finish the file, if there is one."""
        if self._spill is not None:
            self._spill.finish(self.seen)

    def drop(self) -> None:
        """Leave no file."""
        if self._spill is not None:
            self._spill.drop()
