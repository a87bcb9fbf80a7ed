"""Training monitored: what every head does, window by window, and what to do about it."""

from regard.monitoring.monitor import Monitor
from regard.monitoring.projections import Projections
from regard.monitoring.qk_clip import QKClip
from regard.monitoring.reports import Finding, Report
from regard.monitoring.rules import LogitExplosion

__all__ = [
    "Finding",
    "LogitExplosion",
    "Monitor",
    "Projections",
    "QKClip",
    "Report",
]
