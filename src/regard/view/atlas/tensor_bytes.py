"""The bytes of a tensor, as they lie in memory."""

from __future__ import annotations

import ctypes

from torch import Tensor


def to_bytes(values: Tensor) -> bytes:
    """The bytes of a tensor on the CPU.

    >>> import torch
    >>> to_bytes(torch.tensor([1, 2], dtype=torch.uint8))
    b'\\x01\\x02'
    """
    values = values.contiguous()
    return ctypes.string_at(values.data_ptr(), values.nbytes)
