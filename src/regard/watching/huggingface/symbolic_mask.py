"""A mask that passes for a tensor: models carry it to their attention without ever building it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.calls.alike import Alikes
from regard.errors import RegardError
from regard.masks.algebra import Mask, pairs
from regard.values import Shape

_aten = torch.ops.aten
_SAME = {_aten.clone.default, _aten.detach.default, _aten.alias.default}
SHARED = 8
"""Masks that are kept for texts of the same lengths. A model has one or two."""
_SUMS = {_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.mul.Tensor}


class SymbolicMask(Tensor):
    """A boolean tensor [B, 1, Q, K] without storage, True where a pair may be seen.

    Copies of it are itself. Anything else that is done to it is done to the dense tensor, which is
    built for the occasion.

    >>> from regard import masks
    >>> mask = SymbolicMask.of(masks.causal(), Shape(1, 1, 3, 3), torch.device("cpu"))
    >>> mask.contiguous() is mask, mask.shape
    (True, torch.Size([1, 1, 3, 3]))
    >>> mask[0, 0, :, 1]
    tensor([False,  True,  True])
    """

    mask: Mask | None
    """None lets every pair be seen."""
    lengths: tuple[int, int]
    """How many queries and keys, as its shape has them: asked for at every layer."""
    alikes: Alikes
    """Calls with it that were known, the last one first: other layers mostly make the same, and so
    does the next text of this length."""

    @classmethod
    def of(cls, mask: Mask | None, shape: Shape, device: torch.device) -> SymbolicMask:
        made: SymbolicMask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=device
        )
        made.mask, made.lengths, made.alikes = mask, (shape.Q, shape.K), Alikes()
        return made

    @classmethod
    def shared(cls, mask: Mask | None, shape: Shape, device: torch.device) -> SymbolicMask:
        """The same for further texts of these lengths, if the mask is all numbers."""
        if mask is not None and mask.tensors():
            return cls.of(mask, shape, device)
        # A tensor of inference mode may not be saved for a backward pass outside of it.
        return _shared(mask, shape, device, torch.is_inference_mode_enabled())

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            return args[0]._on(args[0].device)
        if func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            return args[0]._on(kwargs.get("device") or args[0].device)
        if func in _SUMS:
            raise RegardError(
                "a mask of booleans is added to scores, where a model expects one of floats",
                do="a layer that computes attention by hand cannot be watched; if gradient "
                "checkpointing runs a layer again, call backward() while the model is watched",
            )
        args, kwargs = tree_map_only(SymbolicMask, SymbolicMask.dense, (args, kwargs))
        return func(*args, **kwargs)

    def dense(self) -> Bool[Tensor, "b 1 q k"]:
        """Every pair: the n×n tensor."""
        B, H, Q, K = self.shape
        shape = Shape(B, H, Q, K)
        if self.mask is None:
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        q, k = (torch.arange(n, device=self.device) for n in (Q, K))
        return pairs(self.mask.bind(shape, self.device), q, k).expand(shape)

    def _on(self, device: torch.device) -> SymbolicMask:
        B, H, Q, K = self.shape
        return SymbolicMask.of(self.mask, Shape(B, H, Q, K), torch.device(device))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SymbolicMask({self.mask!r}, {list(self.shape)})"


@lru_cache(SHARED)
def _shared(mask: Mask | None, shape: Shape, device: torch.device, inference: bool) -> SymbolicMask:
    return SymbolicMask.of(mask, shape, device)
