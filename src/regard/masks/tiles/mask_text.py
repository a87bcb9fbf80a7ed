"""A mask as text."""

from __future__ import annotations

import torch

from regard.masks.tiles.pair_counts import grid
from regard.masks.tiles.pair_rule import PairRule
from regard.values import Shape

INK = "·▒█"  # empty, partial, full


def draw(bound: PairRule, shape: Shape, width: int, device: torch.device) -> str:
    """One line per query, two columns per key; past `width`, one cell per tile."""
    size = max(1, -(-max(shape.Q, shape.K) // width))
    state = grid(bound, shape, size, size, device, exact=True)[0, 0]
    return "\n".join("".join(2 * INK[s] for s in row) for row in state.tolist())
