"""Whether a call is like one before, by the guards that PyTorch's compiler makes for graphs.

The layers of a model mostly make calls that differ in their numbers only. A kind (calls/kinds.py)
finds that out for any call, from all of its properties, one by one. These guards compare the
properties with those of an earlier call, in two calls of C++, and also fail when PyTorch's state
has changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.backends.contract import Repeated
from regard.calls.kinds import Kind, is_aligned, is_constant, place_of
from regard.masks.algebra import Mask

_GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
AVAILABLE = hasattr(_GUARDS, "TensorGuards") and hasattr(_GUARDS, "GlobalStateGuard")
"""They are private to PyTorch. Without them, the kind of each call is found."""
_KINDS = 4
"""Kinds of calls that are recognised by one mask: of layers, or models, of other widths."""
_dispatch_modes = torch._C._len_torch_dispatch_stack
_flash_sdp = torch._C._get_flash_sdp_enabled


class Alike:
    """Calls that differ in nothing but numbers from one that was made.

    It keeps no tensor of the call: guards hold types, lengths and strides."""

    __slots__ = ("_check_state", "_check_tensors", "_on_cuda", "_place", "mask", "run", "scale")

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        scale: float | None,
        run: Repeated,
    ) -> None:
        self.mask, self.scale, self.run = mask, scale, run
        self._on_cuda = q.is_cuda
        self._place = place_of(q) if self._on_cuda else _flash_sdp()
        three = q, k, v
        # Types, devices and dispatch keys as they are now: a transform, a mode, a tracer, autocast
        # or inference mode changes them.
        self._check_tensors = _GUARDS.TensorGuards(
            *three,
            dynamic_dims_sizes=[list(t.shape) for t in three],
            dynamic_dims_strides=[list(t.stride()) for t in three],
        ).check
        # Grad mode, the types of autocast, determinism, threads.
        self._check_state = _GUARDS.GlobalStateGuard().check

    def found(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None
    ) -> Repeated | None:
        """What runs a call, if it is one of these."""
        if (
            mask is self.mask
            and type(scale) is type(self.scale)
            and scale == self.scale
            and forward_ad._current_level < 0
            # Of PyTorch's own modes (fake tensors, proxies, functionalization) guards say nothing:
            # the compiler asks them while these are on.
            and not _dispatch_modes()
            # Guards end the process when they ask a nested tensor for its strides (torch 2.13).
            and type(q) is type(k) is type(v) is Tensor
            and not (q.is_nested or k.is_nested or v.is_nested)
            and self._check_tensors(q, k, v)
            and self._check_state()
            and (place_of(q) if self._on_cuda else _flash_sdp()) == self._place
            # Only now: the guards have shown that these tensors have memory.
            and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
        ):
            return self.run
        return None


class Alikes(tuple[Alike, ...]):
    """Several kinds of calls, the last found one first."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Guards speak of this process alone: a mask that is sent to another finds its own there.
        return Alikes, ()

    def and_also(self, like: Alike) -> Alikes:
        return Alikes((like, *self)[:_KINDS])


def alike(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    kind: Kind,
    run: Repeated,
) -> Alike | None:
    """Calls like this one, of a known kind; None where guards cannot recognise them."""
    if not AVAILABLE or k is v or q is k or q is v or not is_aligned(kind):
        return None
    if not type(q) is type(k) is type(v) is Tensor:
        return None
    if mask is not None and not is_constant(mask):
        # It holds tensors that may be overwritten, or it may itself change.
        return None
    return Alike(q, k, v, mask, scale, run)
