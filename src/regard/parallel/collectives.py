"""What ranks send each other, as functions that autograd knows.

Each takes and gives several tensors, which travel together: what is sent on as it is may be of
different types. Which gradients there are must be the same on every rank, as the calls themselves
must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import RegardError
from regard.parallel.ranks import Ranks

# The names of torch 2.13, before which they were others.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exchange(torch.autograd.Function):
    """Tensors [W, ...] of which part w goes to rank w; what comes back is what each rank sent."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return exchanged(ranks, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_some(grads, lambda given: Exchange.apply(ctx.ranks, *given))  # type: ignore[no-untyped-call]


class Gather(torch.autograd.Function):
    """[...] of each rank as [W, ...] on all, of which each makes something of its own: gradients
    are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return gathered(ranks, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_some(grads, lambda given: Scatter.apply(ctx.ranks, *given))  # type: ignore[no-untyped-call]


class Scatter(torch.autograd.Function):
    """Tensors [W, ...] summed over the ranks, of which rank w gets part w."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return scattered(ranks, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_some(grads, lambda given: Gather.apply(ctx.ranks, *given))  # type: ignore[no-untyped-call]


class Replicated(torch.autograd.Function):
    """[...] of each rank as [W, ...] on all, of which all make the same: counted once, so the
    gradient of a rank's own part is that of its copy."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, tensor: Tensor) -> Tensor:
        ctx.rank = ranks.rank
        return gathered(ranks, [tensor])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad[ctx.rank]


class Sum(torch.autograd.Function):
    """The sum over the ranks, on all of them, of which all make the same: counted once."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        _run("all_reduce", ranks, lambda: dist.all_reduce(total, group=ranks.group))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def exchanged(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Parts for each rank sent to it: what each rank sent to this one."""
    sent = _together(tensors)
    got = torch.empty_like(sent)
    _run("all_to_all", ranks, lambda: dist.all_to_all_single(got, sent, group=ranks.group))
    return _apart(got, tensors)


def gathered(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What each rank has."""
    mine = [t[None] for t in tensors]
    sent = _together(mine)
    got = sent.new_empty(ranks.size, *sent.shape[1:])
    _run("all_gather", ranks, lambda: _all_gather(got, sent, group=ranks.group))
    return _apart(got, mine)


def largest(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The largest of what ranks have, on all of them."""
    found = tensor.clone()
    _run(
        "all_reduce",
        ranks,
        lambda: dist.all_reduce(found, op=dist.ReduceOp.MAX, group=ranks.group),
    )
    return found


def scattered(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sum of what all ranks have for this one, of tensors of one type."""
    sent = _together(tensors)
    # A sum of numbers that were rounded to half precision is not rounded again at every step.
    if sent.dtype in (torch.float16, torch.bfloat16):
        sent = sent.float()
    got = sent.new_empty(1, *sent.shape[1:])
    _run("reduce_scatter", ranks, lambda: _reduce_scatter(got, sent, group=ranks.group))
    return tuple(part[0] for part in _apart(got.to(tensors[0].dtype), tensors))


def _some(
    grads: tuple[Tensor | None, ...], move: Callable[[list[Tensor]], tuple[Tensor, ...]]
) -> list[Tensor | None]:
    """Those gradients that there are, moved."""
    given = [g for g in grads if g is not None]
    moved = iter(move(given) if given else ())
    return [None if g is None else next(moved) for g in grads]


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [W, ...] as one, in one copy. Those of different types as numbers of the narrowest,
    which only carry what they are."""
    lead = _shared(tensors)
    narrow = min((t.dtype for t in tensors), key=lambda dtype: dtype.itemsize)
    sizes = _sizes(tensors, len(lead), narrow)
    packed = tensors[0].new_empty(*lead, sum(sizes), dtype=narrow)
    for t, room in zip(tensors, packed.split(sizes, -1), strict=True):
        if t.dtype == narrow:
            room.view(t.shape).copy_(t)
        elif t.numel():
            room.copy_(t.contiguous().view(*lead, -1).view(narrow))
    return packed


def _apart(packed: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What was sent together, of as many ranks as there are in `packed`."""
    lead = packed.shape[:-1]
    found = []
    sizes = _sizes(like, len(lead), packed.dtype)
    for part, t in zip(packed.split(sizes, -1), like, strict=True):
        size = *lead, *t.shape[len(lead) :]
        if t.dtype == packed.dtype:
            found.append(part.view(size))
            continue
        # Wider numbers may be read only where their own type may stand.
        wide = packed.new_empty(size, dtype=t.dtype)
        if wide.numel():
            wide.view(*lead, -1).view(packed.dtype).copy_(part)
        found.append(wide)
    return tuple(found)


def _shared(tensors: Sequence[Tensor]) -> torch.Size:
    """The axes that each tensor has a run of numbers for. With batch and heads among them, heads
    of all ranks lie at even distances, and are put together without being copied."""
    heads = {t.shape[:3] for t in tensors}
    return heads.pop() if len(heads) == 1 else tensors[0].shape[:1]


def _sizes(tensors: Sequence[Tensor], lead: int, of: torch.dtype) -> list[int]:
    """How many numbers of a type each tensor takes."""
    return [t.shape[lead:].numel() * t.dtype.itemsize // of.itemsize for t in tensors]


def _run(what: str, ranks: Ranks, run: Callable[[], object]) -> None:
    try:
        run()
    except RuntimeError as error:
        raise lost(what, ranks, error) from error


def lost(what: str, ranks: Ranks, error: Exception) -> RegardError:
    """What is said where a collective fails."""
    cause = str(error).strip().splitlines()
    return RegardError(
        f"{what} failed on {ranks} (group {ranks.name!r})",
        got=f"{type(error).__name__}: {cause[0][:300] if cause else 'without a word'}",
        do="look at what the other ranks say: one of them may have ended, be late, or have made "
        "another call",
    )
