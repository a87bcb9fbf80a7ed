"""Watching a model: which module is running, and what its attention does."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from regard import dispatch
from regard.errors import RegardError
from regard.traces import Trace
from regard.watching.seen import Seen
from regard.watching.torch_functions import AttentionMode

Keep = Literal["statistics", "traces"]


class Watch:
    """A model being watched, between `attach` and `detach` or inside a `with`."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str] | None,
        heads: Sequence[int] | None,
        keep: Keep,
        every: int,
    ) -> None:
        self.model, self.layers, self.heads = model, layers, heads
        self.keep, self.every = keep, every
        self.seen = Seen()
        self._running: list[str] = []
        self._runs = 0
        self._active: AttentionMode | None = None
        self._hooks: list[Any] = []

    def attach(self) -> Seen:
        """Start watching. What is seen grows in the returned value."""
        if self._hooks:
            raise RegardError("this watch is attached already", do="detach() it first")
        for path, module in self.model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(_Enter(self, path)),
                module.register_forward_hook(_Leave(self), always_call=True),
            ]
        return self.seen

    def detach(self) -> None:
        """Stop watching, and leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stop()

    def __enter__(self) -> Seen:
        return self.attach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.detach()
        if error is None and self._runs and not self.seen:
            raise RegardError(
                "the model ran, but no attention was seen",
                got=f"{type(self.model).__name__}, run {self._runs} times",
                accepted="models that call F.scaled_dot_product_attention, nn.MultiheadAttention "
                "or regard" + ("" if self.layers is None else f", at layers {list(self.layers)}"),
                do="see whether the model computes attention by hand, or outside its forward",
            )

    def enter(self, path: str) -> None:
        """A module begins to run."""
        if not self._running:
            if self._runs % self.every == 0:
                self._start()
            self._runs += 1
        self._running.append(path)

    def leave(self) -> None:
        """The module that began last has run."""
        self._running.pop()
        if not self._running:
            self._stop()

    def see(self, trace: Trace) -> None:
        """Note a call of the module that is running."""
        # What runs during the backward pass runs again: gradient checkpointing.
        if torch._C._current_graph_task_id() != -1:
            return
        path = self._running[-1]
        if self.layers is not None and not any(fnmatch(path, name) for name in self.layers):
            return
        trace = trace.detach()
        if self.heads is not None:
            trace = trace[:, list(self.heads)]
        self.seen.layer(path).take(trace, keep=self.keep == "traces")

    def _start(self) -> None:
        self._active = AttentionMode()
        self._active.__enter__()  # type: ignore[no-untyped-call]
        dispatch.WATCHERS.append(self.see)

    def _stop(self) -> None:
        if self._active is not None:
            dispatch.WATCHERS.remove(self.see)
            self._active.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._active = None
        self._running.clear()


class _Enter:
    def __init__(self, watch: Watch, path: str) -> None:
        self.watch, self.path = watch, path

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.watch.enter(self.path)


class _Leave:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.watch.leave()


def watch(
    model: nn.Module,
    *,
    layers: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    keep: Keep = "statistics",
    every: int = 1,
) -> Watch:
    """Look into every attention layer of a model while it runs.

    `layers` are paths of modules (`*` matches anything), `heads` indices; all by default.
    `keep="statistics"` adds up a few numbers per head; `keep="traces"` keeps each call's queries,
    keys and values as well, so that any weight can be asked for. `every=10` looks at every tenth
    run of the model.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    >>> with regard.watch(model, keep="traces") as seen:
    ...     y = model(torch.randn(2, 5, 16))
    >>> seen["self_attn"].trace.weights().shape
    torch.Size([2, 4, 5, 5])
    """
    if not isinstance(model, nn.Module):
        raise RegardError(
            "watch looks at a model", got=type(model).__name__, accepted="a torch.nn.Module"
        )
    if keep not in ("statistics", "traces"):
        raise RegardError(
            "keep= says what to keep of each call",
            got=repr(keep),
            accepted='"statistics" or "traces"',
        )
    if every < 1:
        raise RegardError("every= counts runs of the model", got=str(every), accepted="1 or more")
    return Watch(model, layers, heads, keep, every)
