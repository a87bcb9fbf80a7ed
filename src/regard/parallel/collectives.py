"""What ranks send each other, as functions that autograd knows.

Each takes and gives several tensors of one type, which travel together. Which gradients there are
must be the same on every rank, as the calls themselves must be.
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
    sent = _together(tensors, ranks.size)
    got = torch.empty_like(sent)
    _run("all_to_all", ranks, lambda: dist.all_to_all_single(got, sent, group=ranks.group))
    return _apart(got, tensors)


def gathered(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What each rank has."""
    mine = [t[None] for t in tensors]
    sent = _together(mine, 1)
    got = sent.new_empty(ranks.size, sent.shape[1])
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
    """The sum of what all ranks have for this one."""
    sent = _together(tensors, ranks.size)
    # A sum of numbers that were rounded to half precision is not rounded again at every step.
    if sent.dtype in (torch.float16, torch.bfloat16):
        sent = sent.float()
    got = sent.new_empty(1, sent.shape[1])
    _run("reduce_scatter", ranks, lambda: _reduce_scatter(got, sent, group=ranks.group))
    return tuple(part[0] for part in _apart(got.to(tensors[0].dtype), tensors))


def _some(
    grads: tuple[Tensor | None, ...], move: Callable[[list[Tensor]], tuple[Tensor, ...]]
) -> list[Tensor | None]:
    """Those gradients that there are, moved."""
    given = [g for g in grads if g is not None]
    moved = iter(move(given) if given else ())
    return [None if g is None else next(moved) for g in grads]


def _together(tensors: Sequence[Tensor], parts: int) -> Tensor:
    flat = [t.reshape(parts, -1) for t in tensors]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, 1)


def _apart(packed: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sizes = [t[0].numel() for t in like]
    return tuple(
        part.reshape(len(packed), *t.shape[1:])
        for part, t in zip(packed.split(sizes, 1), like, strict=True)
    )


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
