"""Attention for PyTorch that is fast and can be looked into."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard import biases, cost, interpret, linear, masks, nn, scores
from regard.calls.dispatch import attention, trace
from regard.calls.planning import plan
from regard.calls.plans import Plan
from regard.calls.warm_up import warm_up
from regard.errors import RegardError, RegardWarning
from regard.monitoring import Monitor
from regard.trace_files import load
from regard.traces import Trace
from regard.version import __version__ as __version__
from regard.watching import registration, watch

if TYPE_CHECKING:
    from regard import caches, lab, models, parallel, view

__all__ = [
    "Monitor",
    "Plan",
    "RegardError",
    "RegardWarning",
    "Trace",
    "attention",
    "biases",
    "caches",
    "cost",
    "interpret",
    "lab",
    "linear",
    "load",
    "masks",
    "models",
    "nn",
    "parallel",
    "plan",
    "scores",
    "trace",
    "view",
    "warm_up",
    "watch",
]

registration.offer()

# What is seldom wanted, and brings other packages with it, is imported when it is asked for.
_LATER = ("caches", "lab", "models", "parallel", "view")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
