"""The same calls across ranks: attention and traces of q, k and v whose tokens are sharded.

>>> from regard import parallel
>>> layout = parallel.zigzag(8, 2)          # which of 8 tokens each of 2 ranks has
>>> layout.positions(0), layout.positions(1)
(tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
"""

from regard.parallel.calls import attention, plan, trace
from regard.parallel.choice import ParallelPlan
from regard.parallel.layout import Layout, by_document, contiguous, zigzag
from regard.parallel.merge import merge
from regard.parallel.parallel_trace import ParallelTrace

__all__ = [
    "Layout",
    "ParallelPlan",
    "ParallelTrace",
    "attention",
    "by_document",
    "contiguous",
    "merge",
    "plan",
    "trace",
    "zigzag",
]
