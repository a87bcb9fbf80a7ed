"""Weights that ranks hold parts of (DTensor: FSDP2, tensor parallelism), scaled where they are.

A head's rows may lie on several ranks, so no view of them exists on any. A stand-in does: a factor
per row of the whole weight, all 1, which is cut into heads and scaled as the weight would be. Each
rank then multiplies the rows that it holds by their factors, which is the multiplication that an
unsharded weight would have seen, bit for bit, and asks nobody for anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from regard.errors import RegardError


def is_sharded(t: Any) -> bool:
    """Whether a tensor is a DTensor."""
    # Nobody can hold one without that module, and importing it takes long.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def rows_of(weight: Tensor, *, last: bool = False) -> Tensor:
    """A weight with the axis of outputs first, or the stand-in of one that is sharded. `last` says
    that the axis of outputs is the last."""
    if not is_sharded(weight):
        return weight.T if last else weight
    axis = weight.ndim - 1 if last else 0
    held: Any = weight
    factors: Any = torch.ones(weight.shape[axis], dtype=weight.dtype, device=held.to_local().device)
    factors.stands_for, factors.axis = weight, axis
    return factors  # type: ignore[no-any-return]


def stood_for(view: Tensor) -> Tensor | None:
    """The weight that a view of a stand-in is about."""
    return getattr(_base(view), "stands_for", None)


def settle(views: Iterable[Tensor]) -> None:
    """Multiply the sharded weights by what became of their stand-ins."""
    bases = {id(_base(view)): _base(view) for view in views}
    for base in bases.values():
        if hasattr(base, "stands_for"):
            _multiply(base.stands_for, base, base.axis)


@torch.no_grad()
def _multiply(weight: Any, factors: Tensor, axis: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    if any(placement.is_partial() for placement in weight.placements):
        raise RegardError(
            "QK-clip cannot scale a weight of which each rank holds a partial sum",
            got=f"placements {weight.placements}",
            accepted="weights that are sharded or replicated",
        )
    shape = [1] * weight.ndim
    shape[axis] = -1
    mesh = weight.device_mesh
    whole = DTensor.from_local(
        factors.view(shape), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    # From replicas to shards each rank cuts its own part out: nothing is sent.
    along = [p if getattr(p, "dim", None) == axis else Replicate() for p in weight.placements]
    weight.to_local().mul_(whole.redistribute(placements=along).to_local())


def reshard(model: nn.Module) -> None:
    """Have FSDP2 hold its shards again, as the optimiser does: what it gathered for a forward pass
    that no backward pass followed are copies, and would be thrown away."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    running = distributed.is_available() and distributed.is_initialized()
    if running and module is not None and hasattr(module, "FSDPModule"):
        for part in model.modules():
            if isinstance(part, module.FSDPModule):
                part.reshard()


def refuse_flat(model: nn.Module) -> None:
    """Refuse those who keep weights in flat buffers of their own."""
    module: Any = sys.modules.get("torch.distributed.fsdp")
    flat = module is not None and any(
        isinstance(part, module.FullyShardedDataParallel) for part in model.modules()
    )
    zero = any(hasattr(p, "ds_id") for p in model.parameters())
    if flat or zero:
        raise RegardError(
            "QK-clip cannot scale weights that are flattened and cut without regard to their rows",
            got="FullyShardedDataParallel" if flat else "parameters of DeepSpeed's ZeRO 3",
            accepted="FSDP2 (torch.distributed.fsdp.fully_shard), tensor parallelism by DTensor, "
            "and whole weights",
            do="use fully_shard, or leave qk_clip= out",
        )


def _base(view: Tensor) -> Any:
    return view if view._base is None else view._base
