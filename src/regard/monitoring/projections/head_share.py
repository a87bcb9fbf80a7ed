"""Which of a layer's heads the calls of a rank are of."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from regard.errors import RegardError
from regard.monitoring.projections.module_projections import named, query_weight
from regard.monitoring.projections.sharded_weights import is_sharded

_STATED = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


class HeadShare(NamedTuple):
    """Heads `first` to `first + many` of `total`."""

    first: int
    many: int
    total: int

    @staticmethod
    def of(path: str, module: nn.Module, heads: int, width: int, *, sure: bool) -> HeadShare:
        """Of a call with so many heads of a width, asked while the module runs: then FSDP2 has
        gathered its weights, and what is still sharded is so by tensor parallelism.

        `sure` says that the ranks that are asked together were named, and hold the same heads
        where weights do not tell."""
        stated = _stated(module)
        weight, axis = query_weight(module)
        if is_sharded(weight):
            rows = weight.shape[axis] // width
            total = rows if stated is None else stated
            if total == heads:
                return HeadShare(0, heads, heads)
            index, ranks = _place(weight, axis)
            if heads * ranks == total:
                return HeadShare(index * heads, heads, total)
        elif sure or stated is None or stated <= heads or stated % heads:
            return HeadShare(0, heads, heads)
        raise RegardError(
            "which of a layer's heads this rank computes is not known",
            got=f"{named(path, module)}, called with {heads} heads of {stated or 'more'}",
            accepted="calls with all heads, or heads that are split as the weights are (DTensor, "
            "parallelize_module)",
            do="name the ranks that hold the same heads: Monitor(group=...); under sequence "
            "parallelism by all-to-all (Ulysses) these are the ranks of one place in it",
        )


def _stated(module: nn.Module) -> int | None:
    """How many heads a module says that it has."""
    said = [getattr(module, name, None) for name in _STATED]
    said.append(getattr(getattr(module, "config", None), "num_attention_heads", None))
    return next((n for n in said if isinstance(n, int) and not isinstance(n, bool)), None)


def _place(weight: Any, axis: int) -> tuple[int, int]:
    """Which part of an axis this rank holds, and of how many."""
    index, ranks = 0, 1
    mesh, where = weight.device_mesh, weight.device_mesh.get_coordinate()
    for at, placement in enumerate(weight.placements):
        if placement.is_shard(axis):
            index, ranks = index * mesh.size(at) + where[at], ranks * mesh.size(at)
    return index, ranks
