"""cuDNN's attention through PyTorch, by plans that no other call has decided.

PyTorch (2.11) keeps cuDNN's plan of a backward pass by the layouts of q, k and v alone, with
the layouts that the output and its gradient happened to have at the first call. A later call whose
gradient lies otherwise is read as if it did not, and its gradients are wrong without a word: those
of SDPA too. So here outputs and gradients have one layout, and calls are marked as ours: a share of
dropped weights of minus 0, or of one bit more, drops the same and is kept as another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.transforms import is_batched

_FORWARD = (
    "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal",
    "return_debug_mask", "scale",
)  # fmt: skip
_BACKWARD = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset",
    "attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
)  # fmt: skip
_SAVED = ("query", "key", "value", "output", "logsumexp")
"""What autograd's node of the forward pass keeps, as it calls that."""
_SDPA = torch.nn.functional.scaled_dot_product_attention
_CUDNN = torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
# PyTorch's own binding of the operator, where there is one, reads its arguments quicker.
_attend: Callable[..., tuple[Any, ...]] = getattr(
    torch, "_scaled_dot_product_cudnn_attention", None
) or (lambda *given, **more: torch.ops.aten._scaled_dot_product_cudnn_attention(*given, **more))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The output, in memory in the order of the queries, and the log-sum-exp [B, H, Q, 1]."""
    out, lse, *_ = _attend(q, k, v, bias, True, _marked(dropout), causal, False, scale=scale)
    return out, lse


def pull(
    g_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool, nothing: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, from lse [B, H, Q, 1]. `nothing` is in the place of
    dropout's seed and offset, which are not read."""
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        in_order(g_out, q), q, k, v, in_order(out, q), lse, nothing, nothing, None, None, None,
        q.shape[2], k.shape[2], _marked(0.0), causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def learned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
    grouped: bool,
) -> Tensor | None:
    """The output of a call from which q, k or v learn, if it is one that PyTorch gives cuDNN."""
    if torch.nn.functional.scaled_dot_product_attention is not _SDPA:
        # Other code has replaced it for a while, and means to see this call.
        return None
    if not (knows_forward() and knows_backward()):
        return None
    how = torch._fused_sdp_choice(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=grouped)
    if how != _CUDNN:
        return None
    out, _ = attend(q, k, v, scale, causal, bias, dropout)
    if not lies_in_order(out, q):
        return None
    order_gradient(out.grad_fn, out.stride())
    return out


def order_gradient(node: Any, strides: tuple[int, ...]) -> None:
    """Lay the gradient of an output out as that is, before autograd's node gets it."""
    node.register_prehook(_in_layout(strides))


@lru_cache(256)
def _in_layout(strides: tuple[int, ...]) -> Callable[[tuple[Tensor | None, ...]], Any]:
    def laid(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        g = given[0]
        # Those that are many at once have been taken apart before cuDNN gets them.
        if g is None or is_batched(g) or _lies(g, strides):
            return None
        return _copy(g, strides), *given[1:]

    return laid


def in_order(t: Tensor, q: Tensor) -> Tensor:
    """A tensor of a row for each query, in memory in the order of the queries."""
    strides = order(q, t.shape[-1])
    return t if _lies(t, strides) else _copy(t, strides)


def lies_in_order(t: Tensor, q: Tensor) -> bool:
    return _lies(t, order(q, t.shape[-1]))


def order(q: Tensor, width: int) -> tuple[int, ...]:
    """The strides of an output, as PyTorch chooses them."""
    return _order(q.shape, q.stride(), width)


@lru_cache(256)
def _order(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> tuple[int, ...]:
    found, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda i: (strides[i], -i)):
        found[axis] = step
        step *= width if axis == len(shape) - 1 else shape[axis]
    return tuple(found)


def _lies(t: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has strides, of axes that have more than one element."""
    own = t.stride()
    return own == strides or all(
        n == 1 or a == b for n, a, b in zip(t.shape, own, strides, strict=True)
    )


def _copy(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    fresh = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)
    return fresh.copy_(t)


def _marked(dropout: float) -> float:
    return math.nextafter(dropout, 1.0) if dropout else -0.0


def shows_what_it_keeps(out: Tensor, lse: Tensor) -> bool:
    """Whether autograd's node of an output shows what it keeps, and this log-sum-exp is there as it
    lies in memory: what is mended here is then mended there."""
    node = out.grad_fn
    if not all(hasattr(node, f"_saved_{name}") for name in _SAVED):
        return False
    kept: Tensor = node._saved_logsumexp  # type: ignore[union-attr]
    return kept.data_ptr() == lse.data_ptr() and kept.numel() == lse.numel()


def kept_by(node: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, output and log-sum-exp [B, H, Q, 1], while autograd runs a node."""
    return (
        node._saved_query, node._saved_key, node._saved_value, node._saved_output,
        node._saved_logsumexp,
    )  # fmt: skip


def knows_forward() -> bool:
    """Whether this PyTorch has the operator as it is called here."""
    return _known("_scaled_dot_product_cudnn_attention", _FORWARD)


def knows_backward() -> bool:
    return _known("_scaled_dot_product_cudnn_attention_backward", _BACKWARD)


@cache
def _known(name: str, arguments: tuple[str, ...]) -> bool:
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        return False
    return tuple(a.name for a in operator.default._schema.arguments) == arguments
