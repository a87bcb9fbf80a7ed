"""Traces and statistics from a whole model, while it runs."""

from regard.watching.monitor import Monitor
from regard.watching.projections import Projections
from regard.watching.qk_clip import QKClip
from regard.watching.reports import Report
from regard.watching.seen import Layer, Seen
from regard.watching.statistics import Statistics
from regard.watching.store import load
from regard.watching.watcher import Watch, watch

__all__ = [
    "Layer",
    "Monitor",
    "Projections",
    "QKClip",
    "Report",
    "Seen",
    "Statistics",
    "Watch",
    "load",
    "watch",
]
