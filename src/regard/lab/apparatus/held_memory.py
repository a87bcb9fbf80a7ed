"""How much memory a call holds, as PyTorch's allocator tells its profiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile


def peak(call: Callable[[], object]) -> int:
    """The most bytes that tensors made by a call held at once.

    >>> import torch
    >>> peak(lambda: [torch.zeros(1 << 18) for _ in range(3)]) / 2**20
    3.0
    """
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = most = 0
    events = seen.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler writes to the standard error past Python."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
