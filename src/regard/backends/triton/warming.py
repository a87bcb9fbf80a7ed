"""Kernels made ready for calls of one type and width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from regard.backends.triton.arguments import capability
from regard.backends.triton.common_calls import (
    LONG,
    SHORT,
    Asked,
    attended,
    call,
    launches,
    learn,
    looked_at,
)
from regard.masks.algebra import Mask


def warm_up(
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    masks: Sequence[Mask | None],
    *,
    gradients: bool,
) -> int:
    """Load what came compiled, compile the rest side by side; how many were compiled."""
    index = torch.cuda.current_device() if device.index is None else device.index
    card = capability(torch.device("cuda", index))
    wanted = launches(card, _calls(width, dtype, masks, gradients)).values()
    with torch.cuda.device(index):
        begun = [kernel.ready(index, given, constants) for kernel, given, constants in wanted]
        awaited = [one for one in begun if one is not None]
        for one in awaited:
            one.of.keep(one)
    return len(awaited)


def _calls(
    width: int, dtype: torch.dtype, masks: Sequence[Mask | None], gradients: bool
) -> Iterator[Asked]:
    for mask in masks:
        for n in (SHORT, LONG):
            yield from attended(call(dtype, width, n, mask=mask))
        x = call(dtype, width, SHORT, mask=mask)
        yield from looked_at(x)
        if gradients:
            for groups in (16, 2):
                yield partial(learn, call(dtype, width, SHORT, mask=mask, groups=groups))
    # One query of a decoder against what it keeps: heads alone, and groups of them.
    for groups in (16, 4, 2):
        for keys in (128, 4096, LONG):
            yield from attended(call(dtype, width, 1, keys=keys, groups=groups))
