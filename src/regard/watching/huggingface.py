"""Hugging Face models: their attention as calls of regard's, their masks without n×n.

While a model is watched its attention implementation is `regard`: a function that transformers
calls with queries, keys and values, and one that it calls to make masks.

This file and huggingface_modules.py import transformers, and are imported only when a model of
theirs may exist.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import flash_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard import biases, dispatch, masks
from regard.biases.bias import Bias
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.values import Shape
from regard.watchers import caller, watched
from regard.watching.compiling import uncompiled
from regard.watching.huggingface_modules import (
    attenders,
    attenders_by_name,
    family,
    islands,
    needs_asking,
    never_attends,
    refuse_by_hand,
    settable,
    what_helps,
)
from regard.watching.recovery import EVERYTHING, Places, recovered
from regard.watching.switched_name import SwitchedName
from regard.watching.symbolic import SymbolicMask

__all__ = [
    "NAME",
    "Switch",
    "attend",
    "attenders",
    "attenders_by_name",
    "family",
    "hint",
    "islands",
    "make_mask",
    "needs_asking",
    "never_attends",
    "refuse_by_hand",
]

NAME = "regard"
"""What the implementation is called. "sdpa", "flash" or "/" in it would mean something to
transformers."""

# Known to say nothing about who may see whom, or how much.
_HARMLESS = frozenset({
    "cache_position", "deterministic", "ignore_index", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx",
    "shift_labels", "use_cache",
})  # fmt: skip
_IGNORING = frozenset({"eager", "sdpa", "flex_attention"})
"""Implementations of transformers that do not read cu_seq_lens_q and the like."""


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
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of a transformers module: the output [B, Q, H, E], and weights if asked for."""
    if unknown := _unknown(others):
        raise RegardError(
            f"{type(module).__name__} asks its attention for something that is not known here",
            got=", ".join(f"{name}=" for name in unknown),
            accepted="dropout, scaling, is_causal, sliding_window, softcap, s_aux, position_bias, "
            "indices, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k",
            do="run the model unwatched, or without these arguments",
        )
    # The watcher has PyTorch ask about each function and each shape; here it need not.
    with torch._C.DisableTorchFunction():
        Q, K = query.size(2), key.size(2)
        mask, bias = _mask_and_bias(module, attention_mask, position_bias, is_causal, Q, K)
        if indices is not None:
            chosen = indices.new_zeros(len(indices), 1, Q, K, dtype=torch.bool)
            some = masks.keep(chosen.scatter(-1, indices[:, None].long(), True))
            mask = some if mask is None else mask & some
        packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None
        # Only those who read all four know of packed sequences.
        whole = packed and max_length_q is not None and max_length_k is not None
        if whole and _own(module) not in _IGNORING:
            alone = _packed(module, query, key, cu_seq_lens_q, cu_seq_lens_k)
            mask = alone if mask is None else mask & alone
        if attention_mask is None and sliding_window is not None and sliding_window < K:
            raise RegardError(
                f"{type(module).__name__} asks for a window and gives no mask to place it by",
                got=f"sliding_window={sliding_window}, {Q} queries, {K} keys, attention_mask=None",
                do="give the model an attention_mask",
            )
        sink = None if s_aux is None else s_aux.flatten()
        weights = None
        if _weights_wanted(others):
            trace = dispatch.trace(
                query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap, sink=sink,
                dropout=dropout, training=dropout > 0,
            )  # fmt: skip
            out, weights = trace.out, trace.weights().to(query.dtype)
            if weights.requires_grad:
                # Whoever asks for their gradients finds them between the output and the scores.
                out = _mixed(weights, value, dropout)
        else:
            out = dispatch.attention(
                query, key, value, mask=mask, bias=bias, scale=scaling, softcap=softcap, sink=sink,
                dropout=dropout, training=dropout > 0,
            )  # fmt: skip
        return out.transpose(1, 2).contiguous(), weights


def _mixed(weights: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Values mixed by the very weights that the model gives away."""
    group = weights.shape[1] // value.shape[1]
    dropped = F.dropout(weights, dropout, training=dropout > 0)
    return dropped @ value.repeat_interleave(group, 1)


def _unknown(others: dict[str, Any]) -> list[str]:
    """Arguments that may mean something. (A loop: this is asked at every layer.)"""
    found = []
    for name, given in others.items():
        if given is not None and given is not False and name not in _HARMLESS:
            found.append(name)
    return found


def _mask_and_bias(
    module: nn.Module,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    is_causal: bool | None,
    Q: int,
    K: int,
) -> tuple[Mask | None, Bias | None]:
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
        mask = masks.causal(None if Q == K else 0) if causal and Q > 1 else None
    elif isinstance(attention_mask, SymbolicMask):
        if attention_mask.lengths != (Q, K):
            raise RegardError(
                f"{type(module).__name__} uses a mask made for other lengths",
                got=f"a mask of {list(attention_mask.shape[2:])} for {Q} queries and {K} keys",
            )
        mask = attention_mask.mask
    elif attention_mask.ndim != 4:
        raise RegardError(
            f"{type(module).__name__} uses a mask that could mean several things",
            got=f"{attention_mask.dtype} {list(attention_mask.shape)}",
            accepted="[B or 1, H or 1, Q, K]",
        )
    elif attention_mask.dtype == torch.bool:
        mask = _once(attention_mask, masks.keep)
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    return mask, None if bias is None else _once(bias, biases.dense)


V = TypeVar("V", Mask, Bias)
_made: ContextVar[dict[int, tuple[Tensor, int, Any]] | None] = ContextVar("made", default=None)
"""The masks and biases that a run has made of tensors: all its layers share them."""


def _once(tensor: Tensor, make: Callable[[Tensor], V]) -> V:
    """What is made of a tensor, once in a run as long as nobody writes into it."""
    made = _made.get()
    if made is None or tensor.is_inference() or tensor.requires_grad:
        return make(tensor)
    held = made.get(id(tensor))
    if held is None or held[1] != tensor._version:
        held = made[id(tensor)] = tensor, tensor._version, make(tensor)
    found: V = held[2]
    return found


def _own(module: nn.Module) -> str | None:
    """The implementation that a module would call unwatched."""
    held = _switched.get(id(getattr(module, "config", None)))
    return None if held is None else held.own


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
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = None if capturing is None else capturing._active_collector.get()
    return bool(collected) and any("attentions" in key for key in collected or ())


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """The mask of a call as transformers describes it: symbolic where its parts are known."""
    where = torch.device(device)
    at = Places(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), where)
    mask = recovered(mask_function, attention_mask, at, _kinds())
    if mask is None:
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        dense: Tensor = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            device=device, **others,
        )  # fmt: skip
        return dense
    shape = Shape(batch_size, 1, q_length, kv_length)
    return SymbolicMask.of(None if mask == EVERYTHING else mask, shape, where)


@cache
def _kinds() -> dict[CodeType, str]:
    """The parts transformers builds masks from, by their code."""
    causal, table = masking_utils.causal_mask_function, torch.zeros(1, 1, dtype=torch.int64)
    made_with: dict[str, tuple[Any, ...]] = {
        "and_masks": (causal,),
        "or_masks": (causal,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "chunked_overlay": (1, table[0]),
        "packed_sequence_mask_function": (table,),
        "blockwise_overlay": (table,),
        "padding_mask_function": (table,),
    }
    makers = {name: getattr(masking_utils, name, None) for name in made_with}
    plain = (causal, masking_utils.bidirectional_mask_function)
    return {function.__code__: function.__name__ for function in plain} | {
        make(*made_with[name]).__code__: name for name, make in makers.items() if make is not None
    }


# In compiled models both run between graphs: they read closures, values of masks and watchers, none
# of which a graph can hold.
@uncompiled
def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any
) -> tuple[Tensor, Tensor | None]:
    own = None if type(mask) is SymbolicMask else _own_function(module)
    if own is None:
        before = caller.set(module)
        try:
            return attend(module, query, key, value, mask, **how)
        finally:
            caller.reset(before)
    answer: tuple[Tensor, Tensor | None] = own(module, query, key, value, mask, **how)
    return answer


@uncompiled
def _make_mask(*args: Any, **how: Any) -> Any:
    held = None if watched() else _switched.get(id(how.get("config")))
    own = None if held is None else ALL_MASK_ATTENTION_FUNCTIONS.get(held.own, None)
    return (own or make_mask)(*args, **how)


def _own_function(module: nn.Module) -> Any:
    """What a module calls unwatched, if nobody watches here: a config is one for all threads."""
    own = None if watched() else _own(module)
    if own == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return None if own is None else ALL_ATTENTION_FUNCTIONS.get(own, None)


# For good: another thread may have read it from a config that is switched back.
AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)


@dataclass
class _Switched:
    config: Any
    own: str | None
    """The implementation it had."""
    holders: list[Switch]


_switched: dict[int, _Switched] = {}
"""Configs that are switched to regard, by identity: several watches may hold one."""
_switching = threading.Lock()


class Switch:
    """Turns a model's attention implementation to regard's, and back."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.configs = {id(config): config for config in _configs(modules)}

    def refuse_others(self, sdpa: str | None) -> None:
        """Say so if attention is computed by functions of others, which regard's would put aside:
        they may do more, such as gather a sequence that is split over ranks. `sdpa` is who stands
        in the place of PyTorch's own function."""
        for key, config in self.configs.items():
            held = _switched.get(key)
            own = config._attn_implementation if held is None else held.own
            other = sdpa if own == "sdpa" and sdpa is not None else _other(own)
            if other is not None:
                raise RegardError(
                    "this model's attention is computed by somebody else's function, which "
                    "watching would put aside",
                    got=f"attn_implementation={own!r}, which is {other}",
                    accepted="the functions of transformers and PyTorch, and of regard",
                    do="watch without context or sequence parallelism (context_parallel, Ulysses, "
                    "ring attention) and without packages that replace attention",
                )

    def on(self) -> None:
        _made.set({})
        with _switching:
            for key, config in self.configs.items():
                held = _switched.setdefault(key, _Switched(config, _implementation(config), []))
                held.holders.append(self)
                # The attribute behind the property: setting that would set every config below.
                config._attn_implementation_internal = SwitchedName(NAME, held.own)

    def off(self) -> None:
        """Back, if it was on: an interrupt may have come while it was turned on."""
        _made.set(None)
        with _switching:
            for key in self.configs:
                held = _switched.get(key)
                if held is None:
                    continue
                held.holders = [other for other in held.holders if other is not self]
                if not held.holders:
                    held.config._attn_implementation_internal = held.own
                    del _switched[key]


def _implementation(config: Any) -> str | None:
    own: str | None = config._attn_implementation
    return own


def _other(implementation: str | None) -> str | None:
    """Whose function an implementation is, if not of transformers or regard. A kernel from the hub,
    named by its repository, is one that the model was loaded with."""
    if implementation is None or "/" in implementation:
        return None
    function = ALL_ATTENTION_FUNCTIONS.get(implementation, None)
    found = [function]
    if "flash" in implementation:
        found.append(flash_attention._flash_attention_forward)
    for given in found:
        while isinstance(given, partial):
            given = given.func
        # A wrapper may bear the names of what it wraps; what it can reach tells where it is from.
        module = getattr(given, "__globals__", {}).get("__name__", type(given).__module__)
        if given is not None and module.split(".")[0] not in ("transformers", "regard"):
            return f"{module}.{getattr(given, '__qualname__', type(given).__qualname__)}"
    return None


def _configs(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Any]:
    """The configs that decide which attention the modules of a model call."""
    models = [(path, part) for path, part in modules if isinstance(part, PreTrainedModel)]
    by_hand = {id(part.config) for _, part in models if not settable(part)}
    inside = tuple(f"{path}." if path else "" for path, _ in models)
    held = {
        id(config): config
        for path, part in modules
        if isinstance(config := vars(part).get("config"), PreTrainedConfig)
        and f"{path}.".startswith(inside)
    }
    waiting = list(held.values())
    while waiting:
        config = waiting.pop()
        if id(config) not in by_hand:
            yield config
            below = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [sub for sub in below if sub is not None]


def hint(model: nn.Module, path: str) -> str:
    """What helps to see a module that computes attention by hand, if transformers made it."""
    for above in _upwards(path):
        part = model.get_submodule(above)
        if isinstance(part, PreTrainedModel) and type(part).__module__.startswith("transformers."):
            held = _switched.get(id(part.config))
            return what_helps(part, part.config._attn_implementation if held is None else held.own)
    return ""


def _upwards(path: str) -> Iterator[str]:
    """A path, and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
