"""What of the calls that are seen is kept: where, in how much memory, and so that it stays."""

from regard.watching.kept.calls import KeptCalls
from regard.watching.kept.tensors import held_by_autograd

__all__ = ["KeptCalls", "held_by_autograd"]
