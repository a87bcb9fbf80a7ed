"""Calls of DTensors, which say themselves how their tokens are sharded; answers say it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from regard.errors import RegardError
from regard.parallel.layout import Layout
from regard.parallel.parallel_trace import ParallelTrace
from regard.parallel.ranks import Mesh
from regard.traces import Region

TOKENS = 2
"""The axis that is sharded."""


class Locals(NamedTuple):
    """What this rank has of a call of DTensors, and where its tokens stand."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    key_layout: Layout


def mesh_of(mesh: Mesh | None, *tensors: Any) -> Mesh:
    """Who takes part: those of the mesh that DTensors are on, unless another is named."""
    on: list[DeviceMesh] = [t.device_mesh for t in tensors if isinstance(t, DTensor)]
    return on[0] if mesh is None else mesh


def locals_of(
    q: Any, k: Any, v: Any, mesh: Any, layout: Layout | None, key_layout: Layout | None
) -> Locals:
    """What this rank has, or why it is unknown."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, DTensor):
            raise RegardError(
                "q, k and v are all DTensors, or none is",
                got=f"{name} is a {type(t).__name__}",
                do=f"distribute it as the others, or take {name}.to_local() of these and layout=",
            )
        if t.device_mesh != mesh:
            raise RegardError(
                f"{name} is on another mesh", got=f"{t.device_mesh}", accepted=f"{mesh}"
            )
        if t.ndim != 4 or not _tokens_are_sharded(t):
            raise RegardError(
                "tokens are sharded along one axis of a mesh",
                got=f"{name} {list(t.shape)} as {', '.join(map(str, t.placements))}",
                accepted=f"[B, H, tokens, D] as Shard({TOKENS})",
                do=f"{name}.redistribute(placements=[Shard({TOKENS})])",
            )
    own, of_keys = (_chunks(t.shape[TOKENS], mesh.size()) for t in (q, k))
    for name, given, true in (("layout", layout, own), ("key_layout", key_layout, of_keys)):
        if given is not None and not (isinstance(given, Layout) and _same(given, true)):
            raise RegardError(
                f"DTensors say themselves where their tokens stand, and {name}= says otherwise",
                got=repr(given),
                accepted=f"{true!r}, or None",
                do="for tokens in another order give x.to_local() and layout=",
            )
    return Locals(_local(q), _local(k), _local(v), own, of_keys)


def _local(t: DTensor) -> Tensor:
    """This rank's part. One that is still on its way is waited for."""
    part = t.to_local()
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def _tokens_are_sharded(t: DTensor) -> bool:
    placement, *more = t.placements
    # Exactly this kind: those that are made of it cut an axis otherwise.
    return not more and type(placement) is Shard and placement.dim % t.ndim == TOKENS


def _same(one: Layout, two: Layout) -> bool:
    if one.lengths != two.lengths:
        return False
    return all(torch.equal(one.positions(r), two.positions(r)) for r in range(one.ranks))


def _chunks(length: int, ranks: int) -> Layout:
    """As DTensor cuts an axis: equal runs in order, of which the last may be shorter or empty."""
    size = -(-length // ranks)
    edges = [min(rank * size, length) for rank in range(ranks + 1)]
    runs = tuple(((edges[rank], edges[rank + 1]),) for rank in range(ranks))
    return Layout(runs, f"Shard({TOKENS}) of {length} tokens over {ranks} ranks")


def sharded(t: Tensor, mesh: DeviceMesh, layout: Layout, axis: int = TOKENS) -> Tensor:
    """What each rank has of an answer, as one DTensor."""
    shape = torch.Size([*t.shape[:axis], layout.length, *t.shape[axis + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    found: Tensor = DTensor.from_local(
        t, mesh, [Shard(axis)], run_check=False, shape=shape, stride=stride
    )
    return found


@dataclass(frozen=True, eq=False, repr=False)
class DTensorTrace(ParallelTrace):
    """A trace of DTensors: its answers are DTensors, placed as `placements` says. `local` has those
    of this rank as plain tensors."""

    mesh: DeviceMesh = field(kw_only=True)

    @property
    def local(self) -> ParallelTrace:
        return ParallelTrace(self.call, self.method, self.part, self.rows, self.mask)

    @property
    def out(self) -> Float[Tensor, "b h q e"]:
        return self._of_queries(self.rows.out)

    @property
    def lse(self) -> Float[Tensor, "b h q"]:
        return self._of_queries(self.rows.lse)

    @property
    def max_logit(self) -> Float[Tensor, "b h q"]:
        return self._of_queries(self.rows.max_logit)

    @property
    def entropy(self) -> Float[Tensor, "b h q"]:
        return self._of_queries(self.rows.entropy)

    def indexer_target(
        self, size: int = 64, queries: Region = None
    ) -> Float[Tensor, "b q key_blocks"]:
        if queries is not None:
            raise RegardError(
                "the queries of a region are not sharded as a DTensor is",
                got=f"queries={queries!r}",
                accepted="queries=None",
                do="t.local.indexer_target(...): those of this rank, as a plain tensor",
            )
        return sharded(super().indexer_target(size), self.mesh, self.layout, 1)

    def _of_queries(self, t: Tensor) -> Tensor:
        return sharded(t, self.mesh, self.layout)

    def _of_keys(self, t: Tensor) -> Tensor:
        return sharded(t, self.mesh, self.key_layout)

    def _alike(self, t: Tensor) -> Tensor:
        found: Tensor = DTensor.from_local(t, self.mesh, [Replicate()], run_check=False)
        return found
