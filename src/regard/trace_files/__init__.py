"""What was seen, on disk: trace files, written at once or as traces come, and read again."""

from regard.trace_files.spill import Spill, Spilled
from regard.trace_files.store import load, save, save_trace

__all__ = ["Spill", "Spilled", "load", "save", "save_trace"]
