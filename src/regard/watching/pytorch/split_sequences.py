"""Attention that others split over ranks (DTensor). Along the sequence, what a rank holds is a part
of the attention, and a trace of it would be wrong; along batch and heads it is whole for those."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, distributed

from regard.errors import RegardError


def split_along_the_sequence(*tensors: Tensor) -> str | None:
    """Why queries, keys and values [..., N, D] cannot be traced here, if they are DTensors that are
    split along N."""
    for t in filter(spread, tensors):
        placements: Any = t.placements  # type: ignore[attr-defined]
        if any(placement.is_shard(t.ndim - 2) for placement in placements):
            return (
                f"its sequence is split over ranks ({placements}: context parallelism), and each "
                "rank sees a part of it"
            )
    return None


def spread(t: Any) -> bool:
    """Whether a tensor is a DTensor."""
    # Nobody can hold one without that module; importing it takes long.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def refuse_on_ranks(who: str) -> None:
    """Refuse a function in the place of PyTorch's attention where several ranks run: such as ring
    attention, whose calls are of some keys each. PyTorch's own is known by its DTensors."""
    running = distributed.is_available() and distributed.is_initialized()
    if running and distributed.get_world_size() > 1 and not who.startswith("torch.distributed."):
        raise RegardError(
            "this model's attention function is not PyTorch's own, and on one of several ranks "
            "its calls may hold only some of the keys",
            got=f"F.scaled_dot_product_attention, which is {who}",
            accepted="PyTorch's own function",
            do="watch without sequence parallelism that replaces it (Ulysses, ring attention)",
        )


def held_here(*tensors: Tensor | None) -> list[Tensor | None] | str:
    """What this rank holds of queries, keys, values and mask that are split along batch and heads;
    or why that is not attention by itself."""
    held: list[Any] = [t.to_local() if spread(t) else t for t in tensors]  # type: ignore[union-attr]
    q, k, v = held[:3]
    ways = {getattr(t, "placements", None) for t in tensors[:3]}
    if len(ways) > 1:
        return f"queries, keys and values are spread over ranks unlike each other ({ways})"
    if any(p.is_partial() or p.is_shard(q.ndim - 1) for way in ways if way for p in way):
        return f"ranks hold summands of queries, keys and values, or parts of each ({ways})"
    if q.shape[-3] % k.shape[-3] or k.shape[-3] != v.shape[-3]:
        return f"this rank holds {q.shape[-3]} query heads and {k.shape[-3]} key heads"
    if spread(tensors[3]) and any(not p.is_replicate() for p in tensors[3].placements):  # type: ignore[union-attr]
        return "its mask is split over ranks"
    return held
