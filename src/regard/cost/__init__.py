"""What a call costs, counted from its inputs and its mask."""

from regard.cost.counting import (
    dense_pairs,
    forward_flops,
    least_bytes,
    needed_pairs,
    visited_pairs,
)

__all__ = ["dense_pairs", "forward_flops", "least_bytes", "needed_pairs", "visited_pairs"]
