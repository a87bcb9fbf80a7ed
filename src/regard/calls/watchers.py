"""Watchers, which are shown each trace that is computed: every thread and task has its own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.backends.contract import Rows, SecondPass
from regard.inputs import AttentionInputs
from regard.traces import Trace

See = Callable[[Trace], Tensor | None]
"""Takes a trace. An output that it returns replaces that of the call."""


Columns = Callable[[AttentionInputs, SecondPass], Tensor | None]
"""Takes a call that is about to run, and its second pass. Returns columns of numbers for its keys
[B, H, K, C], to be mixed by the same weights as the values, or None."""


class Watcher(NamedTuple):
    """A function that is shown traces, and what it needs."""

    see: See
    learns: bool = False
    """Whether traces are wanted in the graph of autograd."""
    changes: bool = False
    """Whether it may replace outputs."""
    columns: Columns | None = None


watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
"""The current watchers. Compilers cannot read this: see `watched`."""

caller: ContextVar[Any] = ContextVar("caller", default=None)
"""The module whose attention is computed here, where that is known."""
gives_turned: ContextVar[bool] = ContextVar("gives_turned", default=False)
"""Whether the model is given the output that is computed here with heads behind queries, one
number after the other: a copy, unless it lies so in memory."""


class WatchingMode(TorchFunctionMode):
    """A function mode of a watcher. The compiler cannot read context variables; it knows which
    modes are on, and that other threads have others."""


def watched() -> bool:
    """Whether attention that is computed here, now, is to be shown."""
    if torch.compiler.is_dynamo_compiling():
        modes = range(torch._C._len_torch_function_stack())
        return any(isinstance(torch._C._get_function_stack_at(i), WatchingMode) for i in modes)
    return bool(watchers.get())


def changed() -> bool:
    """Whether outputs of attention that is computed here may be changed: then it is the outputs of
    traces that count."""
    for watcher in watchers.get():  # noqa: SIM110 (this is asked at every layer)
        if watcher.changes:
            return True
    return False


def learned() -> bool:
    """Whether traces that are made here are to be in the graph of autograd."""
    for watcher in watchers.get():  # noqa: SIM110 (as above)
        if watcher.learns or watcher.changes:
            return True
    return False


def begin(
    see: See, *, learns: bool = False, changes: bool = False, columns: Columns | None = None
) -> None:
    """From now on `see` is shown every trace that is made here."""
    watchers.set((*watchers.get(), Watcher(see, learns, changes, columns)))


def weighs() -> bool:
    """Whether somebody has columns mixed beside the values of calls."""
    for watcher in watchers.get():  # noqa: SIM110 (as above)
        if watcher.columns is not None:
            return True
    return False


def columns_for(call: AttentionInputs, asks: SecondPass) -> Float[Tensor, "b h k c"] | None:
    """The columns of a call. Where several want some, each asks for its own, afterwards."""
    wanted = [watcher.columns for watcher in watchers.get() if watcher.columns is not None]
    if len(wanted) != 1:
        return None
    with unwatched():
        return wanted[0](call, asks)


def end(see: See) -> None:
    """`see` is no longer shown traces, if it was."""
    watchers.set(tuple(other for other in watchers.get() if other.see != see))


class unwatched:  # noqa: N801 (as functions that give contexts are named)
    """What regard computes for itself is not shown to watchers. (Were it a generator, that of an
    interrupt would end when its traceback is let go of, and watchers be back that are gone.)"""

    def __enter__(self) -> None:
        self._before = watchers.get()
        watchers.set(())

    def __exit__(self, *_: object) -> None:
        watchers.set(self._before)


def show(trace: Trace) -> Trace:
    """Show a trace to all watchers. Each is shown the call as it was made; the trace that is
    returned has the output that is to be used."""
    # What `unwatched` does, written out: this happens at every layer.
    all_of_them = watchers.get()
    try:
        watchers.set(())
        out = None
        for watcher in all_of_them:
            given = watcher.see(trace)
            out = given if watcher.changes and given is not None else out
    finally:
        watchers.set(all_of_them)
    if out is None:
        return trace
    _, lse, max_logit, entropy = trace.rows
    return replace(trace, rows=Rows(out, lse, max_logit, entropy))
