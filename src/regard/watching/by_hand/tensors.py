"""Which tensors can be followed, and which of them are learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def learned(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a view of one. Those made of one are told by their memory,
    when all of an attention is known."""
    return isinstance(tensor, nn.Parameter) or isinstance(
        None if tensor.is_inference() else tensor._base, nn.Parameter
    )


def plain(tensor: Tensor) -> bool:
    """Whether it holds numbers of its own, in rows and columns."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.is_floating_point()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def every(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for given in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(given, (list, tuple)):
            yield from given
        else:
            yield given
