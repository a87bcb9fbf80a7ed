"""Calls that are made under `torch.func`.

Their tensors are wrapped: they carry gradients or tangents of a transform, or stand for many at
once (`vmap`), and are good for as long as the transform is at work. What is kept of a call outlives
that, so it is kept of the numbers inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from regard.backends.contract import Rows
from regard.traces import Trace
from regard.transforms import is_mapped, unwrapped

MAPPED = "it ran under torch.func.vmap, where one call stands for many"


def take_transformed(trace: Trace, take: Callable[[Trace], None], *, learns: bool) -> bool:
    """Have a call taken that was made under `torch.func`, as if no transform were at work; as it is
    for who `learns` of it, inside the transform. False for a call that stands for many: what would
    be kept of it has other axes than the call."""
    # There since somebody transforms.
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    if any(map(is_mapped, _inside(trace))):
        return False
    if learns:
        take(trace)
        return True
    rows = tuple(trace.rows)
    with temporarily_clear_interpreter_stack():
        take(
            replace(
                trace,
                inputs=trace.inputs.map_tensors(unwrapped),
                rows=Rows(*map(unwrapped, rows)),
                mask=None if trace.mask is None else trace.mask.map_tensors(unwrapped),
            )
        )
    return True


def _inside(trace: Trace) -> tuple[Tensor, ...]:
    return (*trace.inputs.tensors(), *trace.rows.at_hand())
