"""Sequences that others split over ranks. What a rank holds is a part of the attention then, and a
trace of it would be wrong."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def split_along_the_sequence(*tensors: Tensor) -> str | None:
    """Why queries, keys and values [..., N, D] cannot be traced here, if they are DTensors that are
    split along N."""
    # Nobody can hold a DTensor without that module; importing it takes long.
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    for t in tensors:
        if isinstance(t, module.DTensor) and any(
            placement.is_shard(t.ndim - 2) for placement in t.placements
        ):
            return (
                f"its sequence is split over ranks ({t.placements}: context parallelism), and each "
                "rank sees a part of it"
            )
    return None
