"""Weights that a model gives away in its output, and that nobody may ever look at."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.traces import Trace

_AS_IT_IS = frozenset(
    getattr(getattr(Tensor, name), "__get__", getattr(Tensor, name))
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf",
        "is_cuda", "is_nested", "is_sparse", "is_meta", "is_quantized", "size", "dim", "numel",
        "element_size", "is_floating_point", "is_complex", "is_inference", "__len__", "nbytes",
        "_is_zerotensor", "is_contiguous", "stride", "storage_offset", "detach",
    )
)  # fmt: skip
"""What is known without working out a weight."""


class LaterWeights(Tensor):
    """A tensor of weights [B, H, Q, K] that is worked out when something is done with it: of a
    batch entry and a head alone, where it is those that are asked for.

    >>> import regard
    >>> x = torch.randn(1, 2, 5, 4)
    >>> weights = LaterWeights.of(regard.trace(x, x, x), torch.float32)
    >>> weights.shape, weights[0, 1].sum(-1)
    (torch.Size([1, 2, 5, 5]), tensor([1.0000, 1.0000, 1.0000, 1.0000, 1.0000]))
    """

    _trace: Trace | None
    _whole: Tensor | None

    @classmethod
    def of(cls, trace: Trace, dtype: torch.dtype) -> LaterWeights:
        x = trace.inputs
        made: LaterWeights = Tensor._make_wrapper_subclass(
            cls, tuple(x.shape), dtype=dtype, device=x.q.device
        )
        made._trace, made._whole = trace.detach(), None
        return made

    @property
    def source(self) -> Trace | None:
        """What the weights are worked out from, as long as not all of them were."""
        return self._trace

    def whole(self) -> Float[Tensor, "b h q k"]:
        """All of them: n×n for each head."""
        if self._whole is None:
            assert self._trace is not None
            with torch.no_grad():
                self._whole = self._trace.weights().to(self.dtype)
            self._trace = None
        return self._whole

    def _part(self, which: Any) -> Tensor | None:
        """Those of one batch entry, or of a head of it."""
        index = which if isinstance(which, tuple) else (which,)
        whole_numbers = all(isinstance(i, int) and not isinstance(i, bool) for i in index[:2])
        if self._trace is None or not whole_numbers or not 1 <= len(index) <= 4:
            return None
        b, *heads = index[:2]
        part = self._trace[b, heads[0]] if heads else self._trace[b]
        with torch.no_grad():
            found = part.weights().to(self.dtype)
        return found[0, 0][index[2:]] if heads else found[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _AS_IT_IS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is Tensor.__getitem__ and isinstance(args[0], LaterWeights):
            part = args[0]._part(args[1])
            if part is not None:
                return part
        args, kwargs = tree_map_only(LaterWeights, LaterWeights.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(LaterWeights, LaterWeights.whole, (args, kwargs or {}))
        return func(*args, **kwargs)
