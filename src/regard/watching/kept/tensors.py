"""The tensors of traces that are kept: what a model writes to its own later must not change what
was seen."""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, UntypedStorage

from regard.backends.contract import LearnedRows, Noted, Rows, Tabled
from regard.calls.watchers import gives_turned
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.traces import Trace
from regard.transforms import transformed

SHARED = 4
"""Masks that are held to be recognised in the next layer."""
_COPIED_AT_ONCE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types of which several tensors are copied by one launch."""


_GIVEN = Rows, Noted, Tabled, LearnedRows
"""Rows whose output is a tensor that a model was given."""


class KeptTensors:
    """Copies of what may be written over: caches that are filled in place, masks that are set for
    each step, outputs that are scaled. Calls that share a tensor share its copy, while its numbers
    stay what they are."""

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[UntypedStorage, dict[Hashable, _Copied]]
        self._copies = WeakKeyDictionary()
        self._masks: dict[int, tuple[Mask, Mask]] = {}
        self._plain: Mask | None = None
        """The last mask that holds no tensors."""

    def lasting(self, trace: Trace, *, held: bool = False) -> Trace:
        """A trace that stays what it is, whatever the model does with its tensors; those that
        autograd holds (`held`) it leaves alone."""
        x, rows, mask = trace.inputs, trace.rows, trace.mask
        if x.q.is_meta or transformed([x.q, x.k, x.v]):
            return trace
        if held:
            q, k, v = (self._lasting(t) for t in (x.q, x.k, x.v))
        else:
            q, k, v, rows = self._copied_call(x, rows)
        inputs = x.with_qkv(q, k, v)
        # So are masks and what is learned, which calls share too: an optimiser writes to that once
        # autograd has done with it.
        if x.others:
            own = {id(t) for t in (q, k, v)}
            inputs = inputs.map_tensors(lambda t: t if id(t) in own else self._copied(t))
        kept = object.__new__(type(trace))
        # At once, as `with_qkv` does.
        kept.__dict__.update(trace.__dict__)
        kept.__dict__.update(
            inputs=inputs, rows=rows, mask=None if mask is None else self._lasting_mask(mask)
        )
        return kept

    def _lasting_mask(self, mask: Mask) -> Mask:
        """Layers that share a mask go on sharing one."""
        if mask is self._plain:
            return mask
        tensors = mask.tensors()
        if not tensors:
            self._plain = mask
            return mask
        lasting = [self._copied(t) for t in tensors]
        if all(map(is_, lasting, tensors)):
            return mask
        given, made = self._masks.get(id(mask), (None, None))
        if given is not mask or made is None or not all(map(is_, lasting, made.tensors())):
            made = mask.map_tensors(self._copied)
            if len(self._masks) >= SHARED:
                self._masks.clear()
            self._masks[id(mask)] = mask, made
        return made

    def _copied_call(self, x: AttentionInputs, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Rows]:
        """Queries, keys, values and rows of a call. The memory of others is the model's to use
        again."""
        copies: dict[int, Tensor] = {}
        new: list[Tensor] = []
        noted: list[dict[Hashable, _Copied]] = []
        # Calls share keys and values; queries are of one alone.
        for t in (x.k,) if x.v is x.k else (x.k, x.v):
            views = self._copies_of(t)
            before = _valid_copy(views, t)
            if before is None:
                new.append(t)
                noted.append(views)
            else:
                copies[id(t)] = before
        if x.q is not x.k and x.q is not x.v:
            new.append(x.q)
        gives = type(rows) in _GIVEN and not _is_turned_copy(rows.out)
        made = _copies([*new, rows.out] if gives else new)
        for t, copy in zip(new, made, strict=False):
            copies[id(t)] = copy
        for views, t, copy in zip(noted, new, made, strict=False):
            views[_place(t)] = _Copied(ref(copy), version(t))
        q, k, v = copies[id(x.q)], copies[id(x.k)], copies[id(x.v)]
        return q, k, v, _with_out(rows, made[-1]) if gives else rows

    def _lasting(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor) if _was_written_to(tensor) else tensor

    def _copied(self, tensor: Tensor) -> Tensor:
        views = self._copies_of(tensor)
        before = _valid_copy(views, tensor)
        if before is not None:
            return before
        copy = _copy(tensor)
        views[_place(tensor)] = _Copied(ref(copy), version(tensor))
        return copy

    def _copies_of(self, tensor: Tensor) -> dict[Hashable, _Copied]:
        """Of the memory of a tensor, by the place in it."""
        return self._copies.setdefault(tensor.untyped_storage(), {})


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


def _valid_copy(views: dict[Hashable, _Copied], tensor: Tensor) -> Tensor | None:
    """A copy that was made of a tensor before, if its numbers stayed what they were."""
    known = views.get(_place(tensor)) if views else None
    before = None if known is None else known.copy()
    if known is None or before is None or not known.holds(before, tensor):
        return None
    return before


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


def _place(tensor: Tensor) -> Hashable:
    """Where a tensor lies in its memory."""
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_turned_copy(out: Tensor) -> bool:
    """Whether the model is given another tensor than the output of a call, so that nothing that it
    does changes that."""
    # It is written either so, head by head, or as it is turned.
    by_heads = out.is_contiguous() and out.size(1) > 1 and out.size(2) > 1
    return by_heads and gives_turned.get()


def _with_out(rows: Rows, out: Tensor) -> Rows:
    if isinstance(rows, LearnedRows):
        return LearnedRows(_with_out(rows.found, out), rows.joined)
    if isinstance(rows, Tabled):
        return Tabled(out, rows.table)
    if not isinstance(rows, Noted):
        return Rows(out, *rows[1:])
    noted = Noted(out, *rows[1:])
    noted.first = rows.first
    return noted


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of the tensors of a call: on a card by one launch, which takes longer than to copy."""
    if len(tensors) > 1 and tensors[0].is_cuda and all(_goes_with(t, tensors[0]) for t in tensors):
        # Times 1 every number is itself.
        return [*torch._foreach_mul(tensors, 1)]
    return [_copy(t) for t in tensors]


def _goes_with(tensor: Tensor, other: Tensor) -> bool:
    """Whether one launch copies both."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is other.dtype
        and tensor.dtype in _COPIED_AT_ONCE
        and 0 not in tensor.stride()
        and not tensor.requires_grad
    )


def _copy(tensor: Tensor) -> Tensor:
    """With what it repeats still repeated: heads that share keys hold them once."""
    steps = tensor.stride()
    if 0 not in steps:
        return tensor.clone()
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in steps)
    return tensor[once].clone().expand(tensor.shape)
