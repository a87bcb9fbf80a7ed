"""Which inner loop runs: the compiled one where it can be had, else PyTorch's operations."""

from __future__ import annotations

import functools

import torch

from regard.backends.tiled.loop.compiled import Loop
from regard.backends.tiled.loop.library import UnavailableError, library
from regard.backends.tiled.loop.trust import trusted
from regard.inputs import AttentionInputs
from regard.transforms import recorded


@functools.cache
def found() -> tuple[Loop | None, str]:
    """The compiled loop, or why there is none. Looked for once in a process."""
    try:
        loop = Loop(library())
    except UnavailableError as error:
        return None, str(error)
    return (loop, "") if trusted(loop) else (None, "the compiled one gives wrong results here")


def loop_for(device: torch.device, dtype: torch.dtype) -> Loop | None:
    """The compiled loop, if it is for such tensors and can be had."""
    if dtype != torch.float32 or device.type != "cpu" or recorded():
        return None
    return found()[0]


def described(x: AttentionInputs, *, fused: bool) -> str:
    """Which inner loop runs a call, and why not the compiled one."""
    if x.q.device.type != "cpu" or x.compute_dtype != torch.float32:
        return "PyTorch operations (the compiled one is for float32 on the CPU)"
    if recorded():
        return "PyTorch operations (torch.jit.trace records no others)"
    loop, why_not = found()
    if loop is None:
        return f"PyTorch operations ({why_not})"
    return f"compiled for this CPU, {'products and all' if fused else 'between PyTorch products'}"
