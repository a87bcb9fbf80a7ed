"""The ranks that share one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from regard.errors import RegardError

Mesh = DeviceMesh | dist.ProcessGroup
"""Who takes part in a call: a mesh with one axis, or a group of processes."""


@dataclass(frozen=True)
class Ranks:
    """A group of processes, and which of them this one is."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def name(self) -> str:
        return str(self.group.group_name)

    def __str__(self) -> str:
        everywhere = dist.get_rank()
        of_all = f", {everywhere} of all processes" if everywhere != self.rank else ""
        return f"rank {self.rank} of {self.size}{of_all}"


def ranks_of(mesh: Mesh | None) -> Ranks:
    """The ranks of a mesh or group; all there are if none is named."""
    if not dist.is_available() or not dist.is_initialized():
        raise RegardError(
            "regard.parallel works across processes, and there is only this one",
            accepted="processes that torch.distributed knows",
            do="start with torchrun and call torch.distributed.init_process_group first; "
            "for one process there is regard.attention",
        )
    group = dist.group.WORLD if mesh is None else mesh
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            raise RegardError(
                "tokens are cut along one axis of a mesh",
                got=f"a mesh {list(mesh.shape)}" + (f" of {', '.join(names)}" if names else ""),
                accepted="a mesh with one axis",
                do=f"choose one: mesh[{names[-1]!r}]" if names else "name its axes, and choose one",
            )
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise RegardError(
            "mesh= says which processes share the tokens",
            got=type(mesh).__name__,
            accepted="a DeviceMesh with one axis that this process is in, a ProcessGroup, or None "
            "for all processes",
        )
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))
