"""Traces and statistics from a whole model, while it runs."""

from regard.watching.seen import Layer, Seen, Statistics
from regard.watching.store import load
from regard.watching.watcher import Watch, watch

__all__ = ["Layer", "Seen", "Statistics", "Watch", "load", "watch"]
