"""The inner loop in C for float32 on a CPU: built here, called with tensors, compared with the
formulas before it is used."""

from regard.backends.tiled.loop.compiled import (
    AGAIN,
    PULL_AGAIN,
    TYPES,
    Attend,
    Loop,
    Pull,
    Units,
)
from regard.backends.tiled.loop.inner_loop import described, loop_for

__all__ = [
    "AGAIN",
    "PULL_AGAIN",
    "TYPES",
    "Attend",
    "Loop",
    "Pull",
    "Units",
    "described",
    "loop_for",
]
