"""Keys and values that go round the ranks, while each rank keeps its queries."""

from regard.parallel.methods.ring.ring import Ring
from regard.parallel.methods.ring.ring_trace import RingTrace

__all__ = ["Ring", "RingTrace"]
