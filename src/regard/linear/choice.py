"""Whether a call runs in Triton's kernels or in PyTorch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.backends.triton.linear.refusals import SHORT
from regard.errors import RegardError
from regard.transforms import recorded, transformed


def takes_kernels(
    backend: str | None,
    tensors: Sequence[Tensor | None],
    queries: int,
    why_not: Callable[[], list[str]],
) -> bool:
    """Whether Triton's kernels run a call: when asked to, or on a GPU where they can."""
    if backend not in (None, "triton", "tiled"):
        raise RegardError(
            "unknown backend", got=repr(backend), accepted="'triton', 'tiled' or None"
        )
    given = [t for t in tensors if t is not None]
    moved = torch.compiler.is_compiling() or recorded() or transformed(given)
    if backend == "tiled" or (backend is None and (moved or given[0].device.type != "cuda")):
        return False
    reasons = ["PyTorch transforms or compiles the call"] if moved else why_not()
    if backend is None:
        return not reasons and queries >= SHORT
    if reasons:
        raise RegardError(
            f"backend 'triton' cannot run this call: {'; '.join(reasons)}",
            accepted="backend='tiled', PyTorch's operations, can",
            do="leave backend= out",
        )
    return True
