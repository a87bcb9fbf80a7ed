"""The attention of a module of transformers as a call of regard's."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from regard import biases, masks
from regard.biases.bias import Bias
from regard.calls import dispatch
from regard.calls.watchers import changed, gives_turned, watched
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.transforms import may_learn
from regard.watching.huggingface import cached_keys, pages
from regard.watching.huggingface.later_weights import LaterWeights
from regard.watching.huggingface.shared_values import once
from regard.watching.huggingface.switch import own_implementation
from regard.watching.huggingface.symbolic_mask import SymbolicMask

try:
    from transformers.utils import output_capturing
except ImportError:
    # Of other versions of transformers.
    output_capturing = None
collector: Any = getattr(output_capturing, "_active_collector", None) or ContextVar(
    "collector", default=None
)
"""Holds, while a model runs, what of its insides its caller asked for."""

# Known not to change which query sees which key, or the weights.
HARMLESS = frozenset({
    "cache_position", "deterministic", "ignore_index", "image_position_ids", "labels",
    "logits_to_keep", "mm_token_type_ids", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "pixel_values", "position_ids", "return_dict",
    "seq_idx", "shift_labels", "use_cache", "vision_feature_layer",
    "vision_feature_select_strategy",
})  # fmt: skip
# One for all calls: a mask says once what it is.
_CAUSAL, _FROM_THE_START = masks.causal(), masks.causal(0)
_IGNORING = frozenset({"eager", "sdpa", "flex_attention"})
"""Implementations of transformers that do not read cu_seq_lens_q and the like."""
_LENGTHS = frozenset({"cu_seq_lens_k", "max_length_q", "max_length_k"})


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of a transformers module: the output [B, Q, H, E], and weights if asked for."""
    paged = others.get("cache") is not None
    if unknown := [name for name in _unknown(others) if not (paged and name in pages.TOLD)]:
        raise RegardError(
            f"{type(module).__name__} asks its attention for something that is not known here",
            got=", ".join(f"{name}=" for name in unknown),
            accepted="dropout, scaling, is_causal, sliding_window, softcap, s_aux, position_bias, "
            "indices, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k",
            do="run the model unwatched, or without these arguments",
        )
    # The watcher has PyTorch ask about each function and each shape; here it need not.
    with torch._C.DisableTorchFunction():
        if query.size(0) == 1 != key.size(0):
            # Queries that are learned are the same for the whole batch.
            query = query.expand(key.size(0), -1, -1, -1)
        if paged:
            told = {
                "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k,
                "max_length_q": max_length_q, "max_length_k": max_length_k, **others,
            }  # fmt: skip
            return _attend_to_pages(
                module, query, pages.opened(module, query, key, value, sliding_window, told),
                softcap=softcap, scale=scaling, sink=s_aux,
            )  # fmt: skip
        Q, K = query.size(2), key.size(2)
        if module.__dict__.get("masked_key_indices") is not None:
            _check_pressed(module, Q, K)
        cache = cached_keys.asker(key, position_bias, indices, sliding_window)
        if cache is not None:
            attention_mask = cache.mask(query, attention_mask)
        else:
            attention_mask = cached_keys.lent(key, attention_mask)
        mask, bias = mask_and_bias(module, attention_mask, position_bias, is_causal, Q, K)
        if indices is not None:
            mask = _and(mask, _chosen(indices, Q, K))
        packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
        # Only those who read all four know of packed sequences.
        whole = packed and max_length_q is not None and max_length_k is not None
        if whole and own_implementation(module) not in _IGNORING:
            mask = _and(mask, _packed(module, query, key, cu_seq_lens_q, cu_seq_lens_k))
        check_window(module, attention_mask, sliding_window, Q, K)
        how: dict[str, Any] = {
            "mask": mask, "bias": bias, "softcap": softcap, "scale": scaling, "dropout": dropout,
            "sink": None if s_aux is None else s_aux.flatten(), "training": dropout > 0,
        }  # fmt: skip
        weights: Tensor | None = None
        wanted = _weights_wanted(others)
        if wanted or cache is not None:
            trace = dispatch.trace(query, key, value, **how)
            out = trace.out
            if cache is not None:
                cache.saw(trace)
            if wanted and not may_learn(trace.inputs.tensors()):
                weights = LaterWeights.of(trace, query.dtype)
            elif wanted:
                weights = trace.weights().to(query.dtype)
                if not changed():
                    # Whoever asks for their gradients finds them between output and scores.
                    out = _mixed(weights, value, dropout)
        else:
            before = gives_turned.get()
            try:
                gives_turned.set(True)
                out = dispatch.attention(query, key, value, **how)
            finally:
                gives_turned.set(before)
        return out.transpose(1, 2).contiguous(), weights


def _attend_to_pages(
    module: nn.Module,
    query: Tensor,
    read: pages.Pages,
    *,
    softcap: float | None,
    scale: float | None,
    sink: Tensor | None,
) -> tuple[Tensor, None]:
    """Of texts that stand one after another. A mask that was made for the row says nothing."""
    out = dispatch.attention(
        query, read.key, read.value, mask=read.mask, softcap=softcap, scale=scale,
        sink=None if sink is None else sink.flatten(),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def attend_in_graph(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same as part of a graph that is compiled, where masks are tensors or not there."""
    unknown = [name for name in _unknown(others) if name not in _LENGTHS]
    if unknown or cu_seq_lens_q is not None:
        raise RegardError(
            f"{type(module).__name__} asks a compiled attention for something that is not known",
            got=", ".join(unknown or ["cu_seq_lens_q"]),
            do="compile without it: packed sequences are told by position_ids as well",
        )
    Q, K = query.size(2), key.size(2)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    bias, mask = position_bias, None
    if attention_mask is None:
        mask = masks.causal(0 if Q != K else None) if causal and Q > 1 else None
    elif attention_mask.dtype == torch.bool:
        mask = masks.keep(attention_mask)
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    if indices is not None:
        mask = _and(mask, _chosen(indices, Q, K))
    check_window(module, attention_mask, sliding_window, Q, K)
    how: dict[str, Any] = {
        "mask": mask, "bias": None if bias is None else biases.dense(bias), "scale": scaling,
        "softcap": softcap, "sink": None if s_aux is None else s_aux.flatten(), "dropout": dropout,
        "training": dropout > 0,
    }  # fmt: skip
    if not others.get("output_attentions"):
        return dispatch.attention(query, key, value, **how).transpose(1, 2).contiguous(), None
    trace = dispatch.trace(query, key, value, **how)
    return trace.out.transpose(1, 2).contiguous(), trace.weights().to(query.dtype)


def _and(mask: Mask | None, other: Mask) -> Mask:
    return other if mask is None else mask & other


def _chosen(indices: Tensor, Q: int, K: int) -> Mask:
    """Each query sees the keys that were chosen for it."""
    table = indices.new_zeros(len(indices), 1, Q, K, dtype=torch.bool)
    return masks.keep(table.scatter(-1, indices[:, None].long(), True))


def check_window(
    module: nn.Module, attention_mask: Tensor | None, window: int | None, Q: int, K: int
) -> None:
    """Without a mask nobody knows where a window stands."""
    if attention_mask is None and window is not None and window < K:
        raise RegardError(
            f"{type(module).__name__} asks for a window and gives no mask to place it by",
            got=f"sliding_window={window}, {Q} queries, {K} keys, attention_mask=None",
            do="give the model an attention_mask",
        )


def _check_pressed(module: nn.Module, Q: int, K: int) -> None:
    """kvpress hides keys of single heads in a function around the model's own, which watching does
    not call, and forgets them when a text begins."""
    if Q == K:
        vars(module)["masked_key_indices"] = None
        return
    if watched() and own_implementation(module) is not None:
        raise RegardError(
            f"{type(module).__name__} has keys that kvpress hides from single heads, which "
            "watching would show",
            got=f"masked_key_indices, {Q} queries, {K} keys",
            do="watch the prompt alone, or use a press that takes the same keys from all heads",
        )


def _mixed(weights: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Values mixed by the very weights that the model gives away."""
    group = weights.shape[1] // value.shape[1]
    dropped = F.dropout(weights, dropout, training=dropout > 0)
    return dropped @ value.repeat_interleave(group, 1)


def _unknown(others: dict[str, Any]) -> list[str]:
    """Arguments that may mean something. (A loop: this is asked at every layer.)"""
    found = []
    for name, given in others.items():
        if given is not None and given is not False and name not in HARMLESS:
            found.append(name)
    return found


def mask_and_bias(
    module: nn.Module,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    is_causal: bool | None,
    Q: int,
    K: int,
) -> tuple[Mask | None, Bias | None]:
    """What a module's mask and position bias are to regard."""
    if (
        type(attention_mask) is SymbolicMask
        and attention_mask.lengths == (Q, K)
        and position_bias is None
    ):
        return attention_mask.mask, None
    bias, mask = position_bias, None
    if attention_mask is None:
        # Who makes masks with transformers never comes here: make_mask always gives one.
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        mask = mask_of_none(Q, K) if causal else None
    elif isinstance(attention_mask, SymbolicMask):
        if attention_mask.lengths == (Q, K):
            mask = attention_mask.mask
        elif _broadcasts(attention_mask.lengths, (Q, K)):
            # One row for all queries, or one key for all, as a tensor would be broadcast.
            mask = None if attention_mask.mask is None else masks.keep(attention_mask.dense())
        else:
            raise RegardError(
                f"{type(module).__name__} uses a mask made for other lengths",
                got=f"a mask of {list(attention_mask.shape[2:])} for {Q} queries and {K} keys",
            )
    elif attention_mask.ndim != 4:
        raise RegardError(
            f"{type(module).__name__} uses a mask that could mean several things",
            got=f"{attention_mask.dtype} {list(attention_mask.shape)}",
            accepted="[B or 1, H or 1, Q, K]",
        )
    elif attention_mask.dtype == torch.bool:
        mask = once(attention_mask, masks.keep)
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    return mask, None if bias is None else once(bias, biases.dense)


def _broadcasts(lengths: tuple[int, int], wanted: tuple[int, int]) -> bool:
    return all(n in (1, m) for n, m in zip(lengths, wanted, strict=True))


def mask_of_none(Q: int, K: int) -> Mask | None:
    """What a causal module means that is given no mask: as with PyTorch's own function, the first
    query stands at the first key, but one alone sees all."""
    if Q == 1:
        return None
    return _CAUSAL if Q == K else _FROM_THE_START


def _packed(module: nn.Module, query: Tensor, key: Tensor, ends_q: Any, ends_k: Any) -> Mask:
    """Sequences that stand one after the other see only themselves. They are counted through all
    rows of the batch."""
    B, _, Q, _ = query.shape
    if key.shape[2] != Q or not torch.equal(ends_q, ends_k) or int(ends_k[-1]) != B * Q:
        raise RegardError(
            f"{type(module).__name__} packs queries in other sequences than keys",
            got=f"cu_seq_lens_q={ends_q}, cu_seq_lens_k={ends_k}, {B} × {Q} queries, "
            f"{B} × {key.shape[2]} keys",
            accepted="the same sequences for both, which hold all of them",
        )
    places = torch.arange(B * Q, device=query.device)
    ids = torch.bucketize(places, ends_k.to(query.device, torch.int64), right=True).view(B, Q)
    if B > 1 and bool((ids[1:, 0] == ids[:-1, -1]).any()):
        raise RegardError(
            f"{type(module).__name__} packs sequences that go on in the next row of the batch",
            got=f"cu_seq_lens_k={ends_k}, rows of {Q}",
        )
    return masks.documents(ids)


def _weights_wanted(others: dict[str, Any]) -> bool:
    """Whether the caller of the model asked for n×n weights in its output."""
    if others.get("output_attentions"):
        return True
    collected = collector.get()
    return bool(collected) and any("attentions" in key for key in collected or ())
