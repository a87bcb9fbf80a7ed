"""Attention for PyTorch that is fast and can be looked into."""

from regard import biases, interpret, masks, nn, scores
from regard.dispatch import attention, plan, trace
from regard.errors import RegardError
from regard.plans import Plan
from regard.traces import Trace
from regard.watching import load, watch

__version__ = "0.1.0.dev0"

__all__ = [
    "Plan",
    "RegardError",
    "Trace",
    "attention",
    "biases",
    "interpret",
    "load",
    "masks",
    "nn",
    "plan",
    "scores",
    "trace",
    "watch",
]
