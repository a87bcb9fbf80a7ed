"""What ranks pass on: each sends to the next one and gets from the one before, at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from regard.parallel.collectives import lost
from regard.parallel.layout import Layout
from regard.parallel.ranks import Ranks


@dataclass
class Transfer:
    """Tensors on their way. They must not change before what comes for them has arrived."""

    ranks: Ranks
    sent: Sequence[Tensor]
    got: list[Tensor]
    works: list[dist.Work]
    device: torch.device

    def arrived(self) -> list[Tensor]:
        """What the rank before sent."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise lost("passing keys on", self.ranks, error) from error
        return [t.to(self.device) for t in self.got]


def pass_on(ranks: Ranks, tensors: Sequence[Tensor], tag: int) -> Transfer:
    """Start to send tensors to the next rank, and to get the same from the one before."""
    device = tensors[0].device
    if ranks.size == 1:
        return Transfer(ranks, tensors, list(tensors), [], device)
    if _reads_host_memory_alone(ranks, device):
        tensors = [t.cpu() for t in tensors]
    got = [torch.empty_like(t) for t in tensors]
    following, before = (
        dist.get_global_rank(ranks.group, (ranks.rank + step) % ranks.size) for step in (1, -1)
    )
    moves = [
        dist.P2POp(move, t, peer, group=ranks.group, tag=tag)
        for move, peer, moved in ((dist.isend, following, tensors), (dist.irecv, before, got))
        for t in moved
        if t.numel()
    ]
    try:
        works = dist.batch_isend_irecv(moves) if moves else []
    except RuntimeError as error:
        raise lost("passing keys on", ranks, error) from error
    return Transfer(ranks, tensors, got, works, device)


def _reads_host_memory_alone(ranks: Ranks, device: torch.device) -> bool:
    """Whether messages of tensors on a device must be copied first. Gloo's collectives do so by
    themselves; its messages take the address of a GPU's memory for one of their own, and end the
    process."""
    return device.type != "cpu" and ranks.group._get_backend(device).name() == "gloo"


def going_round(
    ranks: Ranks, layout: Layout, tensors: Sequence[Tensor]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Shards [B, G, n, ...] of every rank, one rank's after the other, with whose they are: this
    rank's first. The next are on their way while these are used."""
    # Messages are alike, whatever the lengths.
    held: Sequence[Tensor] = [layout.filled(t, 2).contiguous() for t in tensors]
    for step in range(ranks.size):
        owner = (ranks.rank - step) % ranks.size
        moving = pass_on(ranks, held, 0) if step + 1 < ranks.size else None
        yield owner, [t[:, :, : layout.lengths[owner]] for t in held]
        if moving is not None:
            held = moving.arrived()


class Sums:
    """Numbers about keys that go round with these: each rank adds its own, and they come home."""

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        self.ranks, self.layout = ranks, layout
        self._moving: Transfer | None = None

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add to the answer about the keys that are here now, and pass it on."""
        total: Sequence[Tensor] = [self.layout.filled(t, 2).contiguous() for t in tensors]
        if self._moving is not None:
            total = [come.add_(t) for come, t in zip(self._moving.arrived(), total, strict=True)]
        self._moving = pass_on(self.ranks, total, 1)

    def home(self) -> list[Tensor]:
        """The answer of all ranks about this rank's keys."""
        assert self._moving is not None
        n = self.layout.lengths[self.ranks.rank]
        return [t[:, :, :n] for t in self._moving.arrived()]
