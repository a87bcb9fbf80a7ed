"""The kind of a call: all that decides how it is run, and nothing of its numbers.

Calls of one kind are checked, and their backend is chosen, once. Whatever could change the answer
to "how" is part of a kind: shapes, strides, types and alignment of tensors, what is asked for, and
PyTorch's own state. Small tensors in a mask, such as the documents that all layers of a model
share, count by where they lie and how often they were written to. A call that depends on more (a
bias, dropout, transforms, a compiler) has no kind; it goes the long way each time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from regard.device_copies import copy_of
from regard.masks.algebra import Mask
from regard.masks.causal import Causal
from regard.values import Value

_PLAIN = (Tensor, torch.nn.Parameter)
_SPELLED = "_spelled"
_UNSHARED = "_unshared"
_PLAINLY_CAUSAL = (Causal, None)
"""As it is spelled: the last query sees all keys."""
SMALL = 1 << 22
"""Bytes of a mask's tensor up to which it may be held for calls to come."""


def kind_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    backend: str | None,
    statistics: bool,
) -> Hashable | None:
    """The kind of a call without score, bias, sink and dropout; None if it has none."""
    if (
        torch.compiler.is_compiling()
        or type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or _python_dispatch.is_in_torch_dispatch_mode()
        or q.is_nested
        or k.is_nested
        or v.is_nested
        or not (backend is None or type(backend) is str)
        or not (scale is None or type(scale) is float)
        or not (softcap is None or type(softcap) is float)
    ):
        return None
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not (len(q_shape) == len(k_shape) == len(v_shape) == 4):
        return None
    hidden = None
    if mask is not None:
        if isinstance(mask, Mask):
            hidden = spelled(mask) or marked(mask, q.device)
        if hidden is None:
            return None
    place, device = _place(q), q.device
    if place is None or k.device != device or v.device != device:
        return None
    learned = None
    if torch.is_grad_enabled():
        learned = (q.requires_grad, k.requires_grad, v.requires_grad)
    return (
        q_shape, q.stride(), q.dtype, q.data_ptr() % 16,
        k_shape, k.stride(), k.dtype, k.data_ptr() % 16,
        v_shape, v.stride(), v.dtype, v.data_ptr() % 16,
        hidden, scale, softcap, backend, statistics, learned, place,
        torch.is_inference_mode_enabled(),
    )  # fmt: skip


def step_of(kind: Any, k: Tensor, v: Tensor) -> Hashable | None:
    """The kind of one query that sees all keys, about how many they are: steps of generating differ
    by a key each. None for any other."""
    shape, hidden = kind[0], kind[12]
    if shape[2] != 1 or k.shape[2] < 2 or k.shape[2] != v.shape[2] or kind[16]:
        return None
    if hidden is not None and hidden != _PLAINLY_CAUSAL:
        return None
    return (
        "step", kind[:4], k.shape[2].bit_length(), _but_for_keys(k), _but_for_keys(v),
        kind[6:8], kind[10:12], kind[13:],
    )  # fmt: skip


def _but_for_keys(t: Tensor) -> tuple[int, ...]:
    """What decides how keys or values are read but for how many they are: of strides, whether rows
    start at multiples of 16 bytes."""
    batch, heads, _, width = t.shape
    a, b, c, last = t.stride()
    step = 16 // t.element_size()
    return batch, heads, width, a % step, b % step, c % step, last


def spelled(value: Value) -> tuple[Any, ...] | None:
    """What a mask is that is made of numbers alone, so that equal ones hide the same; None for any
    other: tensors, functions and whatever a mask of somebody's own holds may be others by the next
    call. One that cannot change says it once: layer after layer is given the same."""
    known: tuple[Any, ...] | None = vars(value).get(_SPELLED)
    if known is not None:
        return known
    if "__dataclass_fields__" not in vars(type(value)):
        # It may hold more than its parts.
        return None
    found: list[Any] = [type(value)]
    for part in value._parts():
        if isinstance(part, Value):
            inside = spelled(part)
            if inside is None:
                return None
            found.append(inside)
        elif part is None or isinstance(part, (int, float)):
            found.append(part)
        else:
            return None
    if cannot_change(value):
        vars(value)[_SPELLED] = tuple(found)
    return tuple(found)


def unshared(mask: Mask) -> Mask:
    """A mask whose tensors were made for it, so that nobody else writes to their memory."""
    vars(mask)[_UNSHARED] = True
    return mask


def marked(value: Value, device: torch.device) -> tuple[Any, ...] | None:
    """What a mask is that holds numbers and small tensors, for calls on a card; None for any other.
    Who keeps it must hold the mask too: else another tensor may come to lie there.

    Tensors of a CPU that a call on a card is given are known by their copy there. For calls on the
    CPU they have no mark unless they are unshared: whoever shares their memory, as NumPy does,
    writes to them without anybody counting."""
    if not cannot_change(value):
        return None
    counted = device.type == "cuda" or _UNSHARED in vars(value)
    found: list[Any] = [type(value)]
    for part in value._parts():
        if isinstance(part, Value):
            mark = marked(part, device)
            if mark is None:
                return None
            found.append(mark)
        elif isinstance(part, Tensor) and (copy := copy_of(part, device)) is not None:
            found.append(("copy", copy.number))
        elif isinstance(part, Tensor):
            small = part.numel() * part.element_size() <= SMALL
            if not counted or not small or part.device != device or part.is_inference():
                return None
            found.append((
                part.data_ptr(), part._version, part.shape, part.stride(), part.dtype
            ))  # fmt: skip
        elif part is None or isinstance(part, (int, float)):
            found.append(part)
        else:
            return None
    return tuple(found)


def cannot_change(value: Value) -> bool:
    """Whether a value, and all inside it, is frozen."""
    told = getattr(type(value), "__dataclass_params__", None)
    return (
        told is not None
        and told.frozen
        and all(cannot_change(part) for part in value._parts() if isinstance(part, Value))
    )


def _place(q: Tensor) -> Hashable | None:
    """Where a call runs, and what PyTorch was told of such calls; None where that is not known."""
    if q.is_cuda:
        here = torch._C._cuda_getDevice()
        if q.get_device() != here:
            return None
        kind = "cuda"
        told: tuple[int, ...] = (
            here,
            torch.are_deterministic_algorithms_enabled(),
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
        )
    elif q.is_cpu:
        kind, told = "cpu", (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    else:
        return None
    casts = torch.is_autocast_enabled(kind)
    if casts and torch.get_autocast_dtype(kind) is not q.dtype:
        return None
    return kind, casts, told
