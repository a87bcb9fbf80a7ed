"""Memory of ours that CUDA graphs read.

A graph that is captured reads the memory of its launches at every replay, as long as it lives, and
what is computed while it is captured is there only once it is replayed. So tensors made during a
capture are not kept for other calls, and those kept before are never freed: nothing reports when a
graph is gone.
"""

from __future__ import annotations

import torch

_HELD: list[object] = []


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def hold(what: object) -> None:
    """Hold what a graph that is being captured will read."""
    if not any(held is what for held in _HELD):
        _HELD.append(what)
