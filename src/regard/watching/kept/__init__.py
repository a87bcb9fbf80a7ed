"""What of the calls that are seen is kept: where, in how much memory, and so that it stays."""

from regard.watching.kept.calls import KeptCalls

__all__ = ["KeptCalls"]
