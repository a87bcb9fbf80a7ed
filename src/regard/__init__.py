"""Attention for PyTorch that is fast and can be looked into."""

from regard import biases, cost, interpret, masks, nn, scores
from regard.dispatch import attention, plan, trace
from regard.errors import RegardError, RegardWarning
from regard.plans import Plan
from regard.traces import Trace
from regard.watching import Monitor, load, watch

__version__ = "0.1.0.dev0"

__all__ = [
    "Monitor",
    "Plan",
    "RegardError",
    "RegardWarning",
    "Trace",
    "attention",
    "biases",
    "cost",
    "interpret",
    "load",
    "masks",
    "nn",
    "plan",
    "scores",
    "trace",
    "watch",
]
