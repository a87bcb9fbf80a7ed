"""The tensors of traces that are kept: what a model writes to its own later must not change what
was seen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import is_
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, UntypedStorage

from regard.backends.contract import Noted, Rows, Tabled
from regard.calls.watchers import gives_copies
from regard.masks.algebra import Mask
from regard.traces import Trace
from regard.transforms import transformed

SHARED = 4
"""Masks that are held to be recognised in the next layer."""


class KeptTensors:
    """Copies of what may be written over: caches that are filled in place, masks that are set for
    each step, outputs that are scaled. Calls that share a tensor share its copy, while its numbers
    stay what they are."""

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[UntypedStorage, dict[Hashable, _Copied]]
        self._copies = WeakKeyDictionary()
        self._masks: dict[int, tuple[Mask, Mask]] = {}

    def lasting(self, trace: Trace, *, held: bool = False) -> Trace:
        """A trace that stays what it is, whatever the model does with its tensors; those that
        autograd holds (`held`) it leaves alone."""
        x, rows, mask = trace.inputs, trace.rows, trace.mask
        if x.q.is_meta or transformed([x.q, x.k, x.v]):
            return trace
        if not held and not gives_copies.get():
            if isinstance(rows, Tabled):
                rows = Tabled(rows.out.clone(), rows.table)
            elif type(rows) in (Rows, Noted):
                rows = Rows(rows.out.clone(), *rows[1:])
        # The memory of others is the model's to use again. Calls share keys and values.
        copied = self._lasting if held else self._copied
        k = copied(x.k)
        v = k if x.v is x.k else copied(x.v)
        q = k if x.q is x.k else self._lasting(x.q) if held else _copy(x.q)
        inputs = x.with_qkv(q, k, v)
        # So are masks and what is learned, which calls share too.
        other = self._lasting if held else self._copied
        if x.others:
            own = {id(t) for t in (q, k, v)}
            inputs = inputs.map_tensors(lambda t: t if id(t) in own else other(t))
        kept = object.__new__(type(trace))
        # At once, as `with_qkv` does.
        kept.__dict__.update(trace.__dict__)
        kept.__dict__.update(
            inputs=inputs, rows=rows, mask=None if mask is None else self._lasting_mask(mask, other)
        )
        return kept

    def _lasting_mask(self, mask: Mask, other: Callable[[Tensor], Tensor]) -> Mask:
        """Layers that share a mask go on sharing one."""
        tensors = mask.tensors()
        if not tensors:
            return mask
        lasting = [other(t) for t in tensors]
        if all(map(is_, lasting, tensors)):
            return mask
        given, made = self._masks.get(id(mask), (None, None))
        if given is not mask or made is None or not all(map(is_, lasting, made.tensors())):
            made = mask.map_tensors(other)
            if len(self._masks) >= SHARED:
                self._masks.clear()
            self._masks[id(mask)] = mask, made
        return made

    def _lasting(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor) if _was_written_to(tensor) else tensor

    def _copied(self, tensor: Tensor) -> Tensor:
        views = self._copies.setdefault(tensor.untyped_storage(), {})
        at = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = views.get(at)
        if known is not None:
            before = known.copy()
            if before is not None and known.holds(before, tensor):
                return before
        copy = _copy(tensor)
        views[at] = _Copied(ref(copy), version(tensor))
        return copy


class _Copied(NamedTuple):
    """A copy of a tensor, as long as a trace has it, and how often had been written to the
    tensor."""

    copy: ref[Tensor]
    version: int | None

    def holds(self, copy: Tensor, tensor: Tensor) -> bool:
        """Whether the tensor is still what was copied."""
        if tensor.device.type != "cpu" and self.version is not None:
            return self.version == version(tensor)
        # A stream that is captured cannot be waited for.
        waits = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        return not waits and torch.equal(copy, tensor)


def held_by_autograd(trace: Trace) -> bool:
    """Whether autograd holds what was attended to: nobody writes to that unnoticed."""
    x = trace.inputs
    return torch.is_grad_enabled() and all(t.requires_grad for t in (x.q, x.k, x.v))


def version(tensor: Tensor) -> int | None:
    """How often was written to a tensor; None for one that does not tell."""
    return None if tensor.is_inference() else tensor._version


def _was_written_to(tensor: Tensor) -> bool:
    """Whether somebody has written to it, and so may again; or it does not tell."""
    if tensor.requires_grad:
        return False
    return version(tensor) != 0


def _copy(tensor: Tensor) -> Tensor:
    """With what it repeats still repeated: heads that share keys hold them once."""
    steps = tensor.stride()
    if 0 not in steps:
        return tensor.clone()
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in steps)
    return tensor[once].clone().expand(tensor.shape)
