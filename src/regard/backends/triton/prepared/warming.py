"""Kernels made ready for calls of one type and head dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from regard.backends.triton.arguments import capability
from regard.backends.triton.prepared.common_calls import common_calls, launches
from regard.masks.algebra import Mask


def warm_up(
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    masks: Sequence[Mask | None],
    *,
    gradients: bool,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Load what was shipped, compile the rest in parallel; how many were compiled."""
    index = torch.cuda.current_device() if device.index is None else device.index
    card = capability(torch.device("cuda", index))
    calls = common_calls(width, dtype, masks, gradients=gradients)
    wanted = launches(card, calls).values()
    with torch.cuda.device(index):
        begun = [kernel.ready(index, given, constants) for kernel, given, constants in wanted]
        awaited = [one for one in begun if one is not None]
        for done, one in enumerate(awaited, 1):
            one.of.keep(one)
            if progress is not None:
                progress(done, len(awaited))
    return len(awaited)
