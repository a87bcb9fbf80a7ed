"""Models watched while they run: by PyTorch's functions, FlexAttention's and Hugging Face's."""

from importlib import import_module
from typing import Any

from regard.seen import Layer, Seen, Statistics
from regard.trace_files import load
from regard.watching.choices import Keep
from regard.watching.graph_breaks import uncompiled
from regard.watching.tokens import spelled
from regard.watching.watcher import Watch, watch

__all__ = [
    "Keep",
    "Layer",
    "Seen",
    "Statistics",
    "Watch",
    "load",
    "spelled",
    "uncompiled",
    "watch",
]
_MONITORING = ("Monitor", "Projections", "QKClip", "Report")


def __getattr__(name: str) -> Any:
    """What was here once, and is found in a room of its own above this one."""
    if name in _MONITORING:
        return getattr(import_module("regard.monitoring"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
