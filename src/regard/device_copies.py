"""Small tensors of a CPU that calls on a GPU need again and again: documents, lengths, tables.

To copy one to the GPU waits for the GPU, and what is made of a copy would be made anew for each
call. So copies are kept, each with what the tensor held when it was made. Code that shares the
tensor's memory, such as NumPy, may have written to it since without PyTorch counting it: its
numbers are compared, which takes some microseconds.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.values import readable

AWAY = ("cuda",)
"""Kinds of devices for which copies are kept."""
SMALL = 1 << 20
"""Bytes of a tensor up to which its copy is kept: more take longer to compare."""
ROOM = 64


class Copy(NamedTuple):
    """A tensor's copy elsewhere."""

    held: Tensor
    """What the tensor held."""
    there: Tensor
    number: int
    """No other copy has it, also when this one is gone."""


_copies: OrderedDict[Hashable, Copy] = OrderedDict()
_numbers = itertools.count()
_lock = threading.Lock()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device: the same copy, as long as its numbers are the same. It is for reading
    alone."""
    copy = copy_of(tensor, device)
    return tensor.to(device) if copy is None else copy.there


def copy_of(tensor: Tensor, device: torch.device) -> Copy | None:
    """The copy that is kept of a tensor, made if need be; None for a tensor of which none is."""
    if device.type not in AWAY or not _may_be_kept(tensor):
        return None
    key = (
        tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, device, stream_of(device)
    )  # fmt: skip
    with _lock:
        found = _copies.get(key)
        if found is not None:
            _copies.move_to_end(key)
    if found is not None and torch.equal(found.held, tensor):
        return found
    # Code that derives something from a copy checks its version counter. Inference tensors have
    # none.
    with torch.inference_mode(False):
        held = tensor.clone()
        # Of what is held, which another thread does not write to meanwhile.
        made = Copy(held, held.to(device), next(_numbers))
    with _lock:
        _copies[key] = made
        if len(_copies) > ROOM:
            _copies.popitem(last=False)
    return made


def stream_of(device: torch.device) -> int:
    """What runs on a device now. Each stream has its own copies: memory that is let go of is given
    to the next tensor of the stream it was made in, whether or not another still reads it."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    found: int = torch._C._cuda_getCurrentRawStream(index)
    return found


def _may_be_kept(tensor: Tensor) -> bool:
    """Whether it is small and nothing follows it. A CUDA graph would read a copy that may be gone
    when it is replayed."""
    return (
        readable(tensor)
        and not tensor.requires_grad
        and tensor.numel() * tensor.element_size() <= SMALL
        and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )
