"""FlexAttention's masks as masks of regard.

A mask_mod is any function of places, so it is not recognised by its code but by what it does: the
first and last key of every row suggest a mask, which is then held against the function for every
pair. What is not recognised is written out, up to a size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from regard import masks
from regard.errors import RegardError
from regard.masks.algebra import Mask, pairs
from regard.masks.tiles import EMPTY, FULL, grid
from regard.pair_programs import Function
from regard.values import Shape
from regard.watching.flex.pair_functions import PairFunction
from regard.watching.whole_masks import EVERYTHING, both, either

LARGEST = 1 << 28
"""Bytes that a mask or bias of a function may take, written out."""


def mask_of_blocks(
    blocks: Any, shape: Shape, device: torch.device, *, compiled: bool
) -> Mask | None:
    """What a BlockMask hides. The compiled kernel visits the blocks it lists, and asks mask_mod in
    those that are not listed as full; without the compiler, mask_mod alone decides."""
    mask = mask_of(blocks.mask_mod, shape, device)
    size: tuple[int, int] = blocks.BLOCK_SIZE
    if compiled and size[0] < shape.Q + shape.K:
        mask = _as_listed(mask, blocks, shape, device)
    return None if mask == EVERYTHING else mask


def mask_of(function: Function, shape: Shape, device: torch.device) -> Mask:
    """The mask that a function of places stands for."""
    from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

    own = getattr(function, "__self__", None)
    if isinstance(own, Mask) and function == own.allows:
        return own
    if function is noop_mask:
        return EVERYTHING
    combined = {and_masks(noop_mask).__code__: both, or_masks(noop_mask).__code__: either}
    code = getattr(function, "__code__", None)
    if code in combined:
        (parts,) = inspect.getclosurevars(function).nonlocals.values()
        return reduce(combined[code], [mask_of(part, shape, device) for part in parts])
    return _by_what_it_does(PairFunction(function, shape, device))


def _by_what_it_does(function: PairFunction) -> Mask:
    for mask in _suggested(_rows(function), function.shape):
        if _same(mask, function):
            return mask
    if function.pairs > LARGEST:
        raise RegardError(
            "a mask_mod is not one of the masks regard knows, and too large to be written out",
            got=f"{list(function.shape)} [B, H, Q, K]: {function.pairs / 2**20:.0f} MiB",
            accepted="causal masks, windows, contiguous documents, padding and prefixes, and what "
            f"and_masks and or_masks make of them; any other up to {LARGEST / 2**20:.0f} MiB",
            do="put it together with and_masks and or_masks, or pass the allows method of a bound "
            "mask of regard as mask_mod",
        )
    return masks.keep(function.whole())


class _Rows(NamedTuple):
    """The first and last key of every row, and how many it sees: all [B or 1, H or 1, Q]."""

    first: Tensor
    last: Tensor
    number: Tensor


def _rows(function: PairFunction) -> _Rows:
    found = []
    for _, allowed in function.pieces():
        seen = allowed.to(torch.int8)
        last = function.shape.K - 1 - seen.flip(-1).argmax(-1)
        found.append(torch.stack([seen.argmax(-1), last, allowed.sum(-1)]).cpu())
    return _Rows(*torch.cat(found, -1))


def _suggested(rows: _Rows, shape: Shape) -> Iterator[Mask]:
    """Masks that could be meant, the simplest first."""
    Q, K = shape[2:]
    seeing = rows.number > 0
    unbroken = rows.number == rows.last - rows.first + 1
    heads_alike = all(bool((t == t[:, :1]).all()) for t in rows)
    if not seeing.any() or not unbroken[seeing].all() or not heads_alike:
        return
    first, last, seeing = (t[:, 0] for t in (rows.first, rows.last, seeing))
    place = torch.arange(Q)
    ahead, behind = (last - place)[seeing], int((place - first)[seeing].max())
    near, far = int(ahead.min()), int(ahead.max())
    end = K - Q

    def aligned(offset: int) -> int | None:
        return None if offset == end else offset

    uppers = [
        EVERYTHING,
        masks.causal(aligned(far)),
        masks.causal(aligned(near)) | masks.prefix(last[:, 0] + 1),
    ]
    lowers = [EVERYTHING]
    if behind + end >= 0:
        if end <= far < K - 1:
            lowers.append(masks.window(behind + end, far - end))
        lowers.append(masks.window(behind + end, None))
    if behind >= 0:
        lowers.append(masks.window(behind, None, offset=aligned(0)))
    if Q == K:
        starts = first.masked_fill(~seeing, 0)
        lowers.append(masks.documents(F.pad(starts.diff(dim=1) != 0, (1, 0)).cumsum(1)))
    lengths = last.masked_fill(~seeing, 0).amax(1) + 1
    ends = [EVERYTHING, masks.padding(lengths)] if int(lengths.min()) < K else [EVERYTHING]
    for lower, upper, real in product(lowers, uppers, ends):
        yield reduce(both, (upper, lower, real))


def _same(mask: Mask, function: PairFunction) -> bool:
    shape = function.shape
    bound = mask.to(function.device).bind(shape, function.device)
    k = torch.arange(shape.K, device=function.device)
    return all(bool((pairs(bound, q, k) == allowed).all()) for q, allowed in function.pieces())


def _as_listed(mask: Mask, blocks: Any, shape: Shape, device: torch.device) -> Mask:
    """A mask, or what is left of it where the lists of blocks say otherwise."""
    size: tuple[int, int] = blocks.BLOCK_SIZE
    columns = -(-shape.K // size[1])
    some = _listed(blocks.kv_num_blocks, blocks.kv_indices, columns)
    if blocks.full_kv_num_blocks is None:
        full = torch.zeros_like(some)
    else:
        full = _listed(blocks.full_kv_num_blocks, blocks.full_kv_indices, columns)
    states = grid(mask.to(device).bind(shape, device), shape, *size, device, exact=True)
    if bool(((some | full | (states == EMPTY)) & (~full | (states == FULL))).all()):
        return mask
    side = math.gcd(*size)
    partly, wholly = (
        masks.blocks(
            layout.repeat_interleave(size[0] // side, 2).repeat_interleave(size[1] // side, 3)[
                :, :, : -(-shape.Q // side), : -(-shape.K // side)
            ],
            side,
        )
        for layout in (some, full)
    )
    visited = both(mask, partly)
    return visited | wholly if bool(full.any()) else visited


def _listed(numbers: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Lists of blocks as [B or 1, H or 1, rows, columns]."""
    counted = torch.arange(indices.shape[-1], device=indices.device) < numbers[..., None]
    # What is past the end of a list goes to a column that is cut off.
    where = indices.long().masked_fill(~counted, columns)
    layout = torch.zeros(*numbers.shape, columns + 1, dtype=torch.bool, device=indices.device)
    return layout.scatter_(-1, where, True)[..., :columns]
