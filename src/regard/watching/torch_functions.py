"""PyTorch's own attention functions, seen as they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from regard import biases, dispatch, masks
from regard.traces import Trace
from regard.watching.flex_functions import FlexCalls


class AttentionMode(TorchFunctionMode):
    """While active, calls of PyTorch's attention are traced, and so shown to who watches.

    Where nothing is differentiated the trace's output is used, so the work is done once. Where
    gradients are wanted, or dropout draws random numbers, PyTorch's own call gives the output and
    the trace is made beside it: gradients, checkpointing and random numbers stay as they were.
    """

    def __init__(self, where: Callable[[], str], wanted: Callable[[str], bool]) -> None:
        super().__init__()
        self._flex = FlexCalls(where, wanted)
        self.spared: Callable[[], AbstractContextManager[None]] = nullcontext
        """What looking is done in: an observer keeps its errors from the model there."""

    def __enter__(self) -> AttentionMode:
        self._flex.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._flex.__exit__()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """What F.scaled_dot_product_attention gives, and its trace."""
        how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if not dispatch.WATCHERS:
            return _pytorch(query, key, value, attn_mask, dropout_p, is_causal, **how)
        if dropout_p or (torch.is_grad_enabled() and _learns(query, key, value, attn_mask)):
            out = _pytorch(query, key, value, attn_mask, dropout_p, is_causal, **how)
            with torch.no_grad(), self.spared():
                _traced(query, key, value, attn_mask, is_causal, scale)
            return out
        with self.spared():
            out = _traced(query, key, value, attn_mask, is_causal, scale).rows.out
            return out.reshape(*query.shape[:-1], out.shape[-1])
        return _pytorch(query, key, value, attn_mask, dropout_p, is_causal, **how)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """nn.MultiheadAttention looks its function up where it is defined: it finds this one."""
        with self._found_by_name():
            named = dict(zip(_MULTI_HEAD, args, strict=False)) | kwargs
            if not named.get("need_weights", True):
                return _multi_head_forward(**named)
            # With weights asked for it builds n×n and calls nothing that could be seen: it is
            # asked once more without.
            with torch.no_grad(), self.spared():
                _multi_head_forward(**named | {"need_weights": False, "dropout_p": 0.0})
        return _multi_head_forward(**named)

    @contextmanager
    def _found_by_name(self) -> Iterator[None]:
        own = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self.attend
        try:
            yield
        finally:
            F.scaled_dot_product_attention = own


_pytorch = F.scaled_dot_product_attention
_multi_head_forward = F.multi_head_attention_forward
_MULTI_HEAD = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias",
    "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
    "training", "key_padding_mask", "need_weights", "attn_mask", "use_separate_proj_weight",
    "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip


def _learns(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Trace:
    """The trace of a call, in PyTorch's conventions: True may be seen, causal from the start."""
    q, k, v = (_four_axes(t) for t in (query, key, value))
    mask = masks.causal(offset=0) if is_causal else None
    bias = None
    if attn_mask is not None:
        shown = _four_axes(attn_mask) if attn_mask.ndim != 2 else attn_mask[None, None]
        if attn_mask.dtype == torch.bool:
            mask = masks.keep(shown)
        else:
            bias = biases.dense(shown)
    return dispatch.trace(q, k, v, mask=mask, bias=bias, scale=scale)


def _four_axes(t: Tensor) -> Tensor:
    """Leading axes as [B, H]: those before the last of them are the batch."""
    if t.ndim == 2:
        return t[None, None]
    return t.unsqueeze(0) if t.ndim == 3 else t.flatten(0, -4)
