"""cuDNN's attention through PyTorch, by plans that no other call has decided.

PyTorch (2.11) keeps cuDNN's plan of a backward pass by the layouts of q, k and v alone, with
the layouts that the output and its gradient happened to have at the first call. A later call whose
gradient lies otherwise is read as if it did not, and its gradients are wrong without a word: those
of SDPA too. So here outputs and their gradients have one layout, that of the queries, and calls
are marked as ours: PyTorch keeps plans by the share of dropped weights too, and minus 0, or two
bits less of float32, drop the same and are other shares.

Calls with a boolean mask are not among them: PyTorch makes a bias of it, and keeps plans by that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from regard.transforms import is_batched, recorded, under_torch_func, unobserved

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
_SDPA = torch._C._nn.scaled_dot_product_attention
_ALIGNED = 16
"""Bytes at a multiple of which cuDNN wants memory to start."""
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
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


class _Found(TorchDispatchMode):
    """Has cuDNN's forward pass give what was found already."""

    def __init__(self, found: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._scaled_dot_product_cudnn_attention.default:
            return self.found
        return func(*args, **(kwargs or {}))


def join(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool,
    nothing: Tensor,
) -> None:  # fmt: skip
    """Make an output that others computed, with its log-sum-exp [B, H, Q], one of cuDNN's forward
    pass to autograd. `nothing` is in the place of dropout's seed and offset."""
    n = q.shape[2], k.shape[2]
    found = _Found((out, lse.unsqueeze(-1), None, None, *n, nothing, nothing, None))
    # As `with` enters it, it also writes to what all threads read.
    _push_mode(found)
    try:
        attend(q, k, v, scale, causal)
    finally:
        _pop_mode()


def pull(
    g_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool, nothing: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, from lse [B, H, Q, 1]. `nothing` is in the place of
    dropout's seed and offset, which are not read."""
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        like_queries(g_out, q), q, k, v, like_queries(out, q), lse, nothing, nothing, None, None,
        None, q.shape[2], k.shape[2], _marked(0.0), causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def attend_to_learn(
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
    if recorded() or not unobserved((q, k, v)) or not (knows_forward() and knows_backward()):
        return None
    if any(stride == 0 and n > 1 for stride, n in zip(q.stride(), q.shape, strict=True)):
        return None
    how = torch._fused_sdp_choice(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=grouped)
    if how != _CUDNN:
        return None
    out, _ = attend(q, k, v, scale, causal, bias, dropout)
    if not lies_like_queries(out, q):
        return None
    lay_gradients_like(out)
    return out


def lay_gradients_like(out: Tensor) -> None:
    """Have gradients of an output laid out as that is, before autograd's node gets them."""
    node = out.grad_fn
    assert node is not None
    node.register_prehook(_laying_out(out.stride()))


@lru_cache(256)
def _laying_out(strides: tuple[int, ...]) -> Callable[[tuple[Tensor | None, ...]], Any]:
    def laid_out(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        g = given[0]
        if g is None:
            return None
        # Of one that stands for many only each by itself has a layout: all are copied.
        many = is_batched(g) or under_torch_func()
        if not many and has_strides(g, strides) and not g.data_ptr() % _ALIGNED:
            return None
        return _copy(g, strides), *given[1:]

    return laid_out


def like_queries(t: Tensor, q: Tensor) -> Tensor:
    """A tensor of a row for each query, in memory as PyTorch lays an output out: in the order of
    the queries."""
    strides = _strides(q.shape, q.stride(), t.shape[-1])
    fits = has_strides(t, strides) and not t.data_ptr() % _ALIGNED
    return t if fits else _copy(t, strides)


def lies_like_queries(t: Tensor, q: Tensor) -> bool:
    return has_strides(t, _strides(q.shape, q.stride(), t.shape[-1]))


@lru_cache(256)
def _strides(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Of an output of such a width."""
    like = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    found, step = [0] * len(shape), 1
    for axis in reversed(_outer_to_inner(like)):
        found[axis] = step
        step *= width if axis == len(shape) - 1 else shape[axis]
    return tuple(found)


def has_strides(t: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has strides, of axes that have more than one element."""
    own = t.stride()
    return own == strides or all(
        n == 1 or a == b for n, a, b in zip(t.shape, own, strides, strict=True)
    )


def _copy(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy with the strides of a tensor without gaps."""
    order = _outer_to_inner(strides)
    dense = t.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(axis) for axis in range(len(order))])


def _outer_to_inner(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: (-strides[axis], axis))


def _marked(dropout: float) -> float:
    return dropout * (1 - 2**-22) if dropout else -0.0


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
