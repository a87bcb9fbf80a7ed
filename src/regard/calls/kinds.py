"""The kind of a call: everything that decides how it is run, but not its numbers.

Calls of one kind are checked, and their backend is chosen, once. A kind holds everything that could
change how a call is run: shapes, strides, types and alignment of tensors, the arguments, and
PyTorch's own state. Small tensors in a mask, such as the documents that all layers of a model
share, are identified by their address and version. Calls with dropout, a sink or a bias of few
numbers have kinds of their own on a GPU. A call that depends on more (a dense bias, transforms, a
compiler) has no kind; it is checked, and its backend chosen, each time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.biases.alibi import Alibi
from regard.biases.bias import Bias
from regard.biases.relative import Relative
from regard.device_copies import copy_of
from regard.masks.algebra import Mask
from regard.masks.causal import Causal
from regard.masks.keep import Keep
from regard.values import Value

Kind = tuple[Any, ...]
"""Shapes, strides, the mask, and everything else."""
_SHIFTED, _STATISTICS = 3, 7
"""Where in the last part of a kind alignment is, and whether a trace is wanted."""
_functorch_is_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_key_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_BEFORE_AUTOGRAD = torch._C.DispatchKey.PreDispatch
_flash_sdp = torch._C._get_flash_sdp_enabled
_mem_efficient_sdp = torch._C._get_mem_efficient_sdp_enabled
_math_sdp = torch._C._get_math_sdp_enabled
_cudnn_sdp = torch._C._get_cudnn_sdp_enabled
_deterministic = torch._C._get_deterministic_algorithms
_any_autocast = torch._C._is_any_autocast_enabled
_num_threads = torch.get_num_threads
_grad_enabled = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
_PLAIN = (Tensor, torch.nn.Parameter)
_FEW_NUMBERS = (Alibi, Relative)
_ENCODED = "_spelled"
_UNSHARED = "_unshared"
_PLAINLY_CAUSAL = (Causal, None)
"""The key of `causal()`: the last query sees all keys."""
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
) -> Kind | None:
    """The kind of a call without score, bias, sink and dropout, outside of compilers; None if it
    has none.

    This runs at every layer of a model, mostly with cold processor caches. So each property is read
    once, and PyTorch's C functions are called by names of this file."""
    if (
        type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or _functorch_is_active()
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
        or _dispatch_modes()
        # Modes that stand before autograd are on no stack.
        or _key_is_included(_BEFORE_AUTOGRAD)
        or not (scale is None or type(scale) is float)
        or not (softcap is None or type(softcap) is float)
        or not (backend is None or type(backend) is str)
    ):
        return None
    if q.is_cuda:
        place = place_of(q)
        if place is None or not (k.is_cuda and v.is_cuda):
            return None
        if not (k.get_device() == v.get_device() == place[0]):
            return None
    elif q.is_cpu and k.is_cpu and v.is_cpu:
        place = (_num_threads(), _flash_sdp())
    else:
        return None
    casts = _any_autocast() and torch.is_autocast_enabled(q.device.type)
    if casts and torch.get_autocast_dtype(q.device.type) is not q.dtype:
        return None
    masked = None
    if mask is not None:
        # Only masks have a key; anything else given as one is refused later.
        masked = getattr(mask, _ENCODED, None)
        if masked is None and isinstance(mask, Mask):
            masked = encoded(mask) or marked(mask, q.device)
        if masked is None:
            return None
    learned = None
    if _grad_enabled():
        learned = (q.requires_grad, k.requires_grad, v.requires_grad)
    try:
        shapes = q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        strides = q.stride(), k.stride(), v.stride()
        places = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:
        # Nested and sparse tensors have none of their own.
        return None
    if not (places[0] and places[1] and places[2]) or q.is_neg() or k.is_neg() or v.is_neg():
        # What is in memory, if anything, is not what they stand for.
        return None
    if not (len(q_shape) == len(k_shape) == len(v_shape) == 4):
        return None
    # Where all are at multiples of 16 bytes, as nearly always, that is one number.
    shifted = (places[0] | places[1] | places[2]) % 16
    return (
        shapes, strides, masked,
        (
            q.dtype, k.dtype, v.dtype, shifted and tuple(place % 16 for place in places),
            scale, softcap, backend, statistics, learned, place, casts, _deterministic(),
            _inference(),
        ),
    )  # fmt: skip


def kind_with_more(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    backend: str | None,
    statistics: bool,
    *,
    bias: Bias | None,
    sink: Tensor | None,
    dropout: float,
    training: bool,
) -> Hashable | None:
    """The kind of a call on a GPU that drops weights, or has a sink or a bias of few numbers, which
    do not learn; None if it has none. Whoever keeps it must keep sink and bias too."""
    if not _on_gpu(q) or not (dropout == 0 or (type(dropout) is float and 0 < dropout < 1)):
        return None
    kind = kind_of(q, k, v, mask, scale, softcap, backend, statistics)
    if kind is None or not (bias is None or type(bias) in _FEW_NUMBERS):
        return None
    given = ([] if bias is None else bias.tensors()) + ([] if sink is None else [sink])
    learns = _grad_enabled()
    for t in given:
        if type(t) not in _PLAIN or t.device != q.device or t.is_inference():
            return None
        if t.is_neg() or t._is_zerotensor():
            return None
        if learns and t.requires_grad:
            return None
    biased = None if bias is None else marked(bias, q.device)
    if bias is not None and biased is None:
        return None
    return *kind, dropout if training else 0.0, biased, None if sink is None else _mark(sink)


def _on_gpu(q: object) -> bool:
    return isinstance(q, Tensor) and q.is_cuda


def kind_to_bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    backend: str | None,
    statistics: bool,
    bias: Bias | None,
) -> Hashable | None:
    """The kind of a call on a CPU whose mask or bias holds tensors and is bound anew each time;
    None if it has none."""
    if not isinstance(q, Tensor) or not q.is_cpu:
        return None
    written = bias is not None and type(bias) not in _FEW_NUMBERS
    if not statistics and softcap is None and (written or isinstance(mask, Keep)):
        # PyTorch's own kernel attends.
        return None
    forms: list[Any] = []
    for value, kind in ((mask, Mask), (bias, Bias)):
        form = _form(value) if isinstance(value, kind) else None
        if value is not None and form is None:
            return None
        forms.append(form)
    found = kind_of(q, k, v, None, scale, softcap, backend, statistics)
    return None if found is None else (*found, *forms)


def _form(value: Value) -> tuple[Any, ...] | None:
    """All of a mask or a bias but for the numbers in its tensors; None for one made of anything
    else, that learns, or whose numbers are not those in memory."""
    if not cannot_change(value) or "__dataclass_fields__" not in vars(type(value)):
        return None
    found: list[Any] = [type(value)]
    for part in value._parts():
        if isinstance(part, Value):
            inside = _form(part)
            if inside is None:
                return None
            found.append(inside)
        elif type(part) in _PLAIN and part.is_cpu:
            if part.requires_grad or part.is_neg() or part._is_zerotensor():
                return None
            found.append((part.shape, part.dtype))
        elif part is None or isinstance(part, (int, float)):
            found.append(part)
        else:
            return None
    return tuple(found)


def _mark(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t._version, t.shape, t.stride(), t.dtype


def place_of(q: Tensor) -> tuple[int, ...] | None:
    """Which GPU is the current one, and which of PyTorch's kernels are enabled; None for a tensor
    on another GPU."""
    here = torch._C._cuda_getDevice()
    if q.get_device() != here:
        return None
    return here, _flash_sdp(), _mem_efficient_sdp(), _math_sdp(), _cudnn_sdp()


def is_aligned(kind: Kind) -> bool:
    """Whether queries, keys and values all start at multiples of 16 bytes."""
    return not kind[3][_SHIFTED]


def step_of(kind: Kind) -> Kind | None:
    """The kind of a call of one query that sees all keys, with their number rounded: each step of
    generating has one key more. None for any other call."""
    shapes, (q_stride, (a, b, c, last), (d, e, f, v_last)), masked, how = kind
    q_shape, (B, G, K, D), (v_B, v_G, v_K, E) = shapes
    if q_shape[2] != 1 or K < 2 or v_K != K or how[_STATISTICS]:
        return None
    if masked is not None and masked != _PLAINLY_CAUSAL:
        return None
    # Of strides, whether all rows of keys and values start at multiples of 16 bytes.
    shifted = (a | b | c | d | e | f) % 16
    return q_shape, q_stride, K.bit_length(), B, G, D, last, v_B, v_G, E, v_last, shifted, how


def encoded(value: Value) -> tuple[Any, ...] | None:
    """The key of a mask that is made of numbers alone: masks with equal keys mask the same pairs.
    None for any other, since tensors, functions and the fields of custom masks may change before
    the next call. It is stored in a mask that cannot change, because all layers are given the
    same."""
    known: tuple[Any, ...] | None = vars(value).get(_ENCODED)
    if known is not None:
        return known
    if "__dataclass_fields__" not in vars(type(value)):
        # A subclass that is no dataclass itself may hold more than its parts.
        return None
    found: list[Any] = [type(value)]
    for part in value._parts():
        if isinstance(part, Value):
            inside = encoded(part)
            if inside is None:
                return None
            found.append(inside)
        elif part is None or isinstance(part, (int, float)):
            found.append(part)
        else:
            return None
    if cannot_change(value):
        vars(value)[_ENCODED] = tuple(found)
    return tuple(found)


def unshared(mask: Mask) -> Mask:
    """Mark a mask whose tensors were made for it, so that nothing else writes to their memory."""
    vars(mask)[_UNSHARED] = True
    return mask


def marked(value: Value, device: torch.device) -> tuple[Any, ...] | None:
    """The key of a mask that holds numbers and small tensors, for calls on a GPU; None for any
    other. Whoever keeps the key must keep the mask too: else another tensor may get the same
    address.

    CPU tensors in a call on a GPU are identified by their copy there. For calls on the CPU they
    have no key unless they are unshared: NumPy, for one, can share their memory, and writes to it
    without changing their version."""
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
            found.append(_mark(part))
        elif part is None or isinstance(part, (int, float)):
            found.append(part)
        else:
            return None
    return tuple(found)


def is_constant(mask: Value) -> bool:
    """Whether a mask says the same at every call that is given it: it is frozen, and so are all its
    parts, and its tensors were made for it."""
    if not cannot_change(mask) or "__dataclass_fields__" not in vars(type(mask)):
        return False
    for part in mask._parts():
        if isinstance(part, Value):
            if not is_constant(part):
                return False
        elif isinstance(part, Tensor):
            if _UNSHARED not in vars(mask):
                return False
        elif not (part is None or isinstance(part, (int, float))):
            return False
    return True


def cannot_change(value: Value) -> bool:
    """Whether a value, and all inside it, is frozen."""
    told = getattr(type(value), "__dataclass_params__", None)
    return (
        told is not None
        and told.frozen
        and all(cannot_change(part) for part in value._parts() if isinstance(part, Value))
    )
