"""Who is shown the attention that is computed: for each thread, and each task in it, its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from regard.traces import Trace

See = Callable[[Trace], None]

_watchers: ContextVar[tuple[See, ...]] = ContextVar("watchers", default=())

caller: ContextVar[Any] = ContextVar("caller", default=None)
"""The module whose attention is computed here, where that is known."""


class WatchingMode(TorchFunctionMode):
    """A function mode of somebody who watches. The compiler cannot ask for context variables; it
    knows which modes are on, and that they are others in other threads."""


def watched() -> bool:
    """Whether attention that is computed here, now, is to be shown."""
    if torch.compiler.is_dynamo_compiling():
        modes = range(torch._C._len_torch_function_stack())
        return any(isinstance(torch._C._get_function_stack_at(i), WatchingMode) for i in modes)
    return bool(_watchers.get())


def begin(see: See) -> None:
    """From now on `see` is shown every trace that is made here."""
    _watchers.set((*_watchers.get(), see))


def end(see: See) -> None:
    """`see` is shown nothing any more, whether it was or not."""
    _watchers.set(tuple(other for other in _watchers.get() if other != see))


@contextmanager
def unwatched() -> Iterator[None]:
    """What regard does on its own account is not shown to who watches."""
    before = _watchers.set(())
    try:
        yield
    finally:
        _watchers.reset(before)


def show(trace: Trace) -> None:
    # What `unwatched` does, written out: this happens at every layer.
    watchers = _watchers.get()
    before = _watchers.set(())
    try:
        for see in watchers:
            see(trace)
    finally:
        _watchers.reset(before)
