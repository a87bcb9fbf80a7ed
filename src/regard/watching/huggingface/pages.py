"""Continuous batching: many texts stand one after another in one row, and their keys and values lie
in pages of a cache that all of them share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from regard import masks
from regard.errors import RegardError
from regard.masks.algebra import Mask
from regard.masks.packed import Packed

PREFIX = "paged|"
"""Before the name of an implementation that reads pages, in transformers before 5.22."""
SLIDING = "sliding_attention"
TOLD = frozenset({
    "block_table", "cache", "cu_seq_lens_k", "cu_seq_lens_q", "logits_indices",
    "logits_processor_args", "max_length_k", "max_length_q", "max_seqlen_k", "max_seqlen_q",
    "read_index", "write_index",
})  # fmt: skip
"""What continuous batching tells attention."""


class Pages(NamedTuple):
    """What the texts of a call hold: all their keys and values, and which query sees which key."""

    key: Tensor
    value: Tensor
    mask: Mask


def opened(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None, told: Any
) -> Pages:
    """New keys and values are written to the cache, and those of the same texts read from it."""
    cache, ends_q = told["cache"], told["cu_seq_lens_q"]
    if told.get("block_table") is not None or ends_q is None:
        raise RegardError(
            f"{type(module).__name__} is asked to read pages by a table of blocks",
            got="block_table" if ends_q is not None else "no cu_seq_lens_q",
            accepted="what generate_batch tells an implementation that is not flash attention",
            do="leave max_blocks_per_request in ContinuousBatchingConfig as it is",
        )
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RegardError(
            "a CUDA graph cannot hold attention to pages: it depends on how long the texts are",
            got="generate_batch with CUDA graphs",
            do="set use_cuda_graph=False in ContinuousBatchingConfig",
        )
    told = dict(told)
    layer: Any = module.layer_idx
    kind: Any = type(cache)
    if _takes_everything(kind):
        # What it is told is cut down to what is of this layer.
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=told)
    else:
        rows = cache.update(
            key_states=key, value_states=value, layer_idx=layer,
            read_index=told["read_index"], write_index=told["write_index"],
        )  # fmt: skip
        key, value = (t.transpose(0, 1)[None] for t in rows)
    ends_k = told["cu_seq_lens_k"]
    if isinstance(ends_k, dict):
        window = getattr(module, "sliding_window", None) or None
        ends_k = ends_k["full_attention" if window is None else SLIDING]
    elif window is None and getattr(_allocator(cache, layer), "layer_type", None) == SLIDING:
        # Not all modules name the window of their layer.
        window = module.config.sliding_window  # type: ignore[union-attr, assignment]
    return Pages(key, value, _mask(cache, ends_q, ends_k, window, query.shape[2], key.shape[2]))


def _allocator(cache: Any, layer: int) -> Any:
    """What holds the pages of a layer, in transformers 5.22."""
    by_layer = getattr(cache, "layer_to_allocator", None)
    return None if by_layer is None else by_layer[layer]


@cache
def _takes_everything(kind: Any) -> bool:
    """Whether a cache takes all that attention was told, as those of transformers 5.22 do."""
    return "kwargs" in inspect.signature(kind.update).parameters


class _Step(NamedTuple):
    """What the layers of one step share. It holds the tensors, so that they are told apart by what
    they are: each step has its own."""

    ends: tuple[Tensor, Tensor]
    state: tuple[int, int, int, int]
    """How many queries and keys there are, and how often somebody has written into the ends."""
    mask: Mask

    def is_of(self, ends: tuple[Tensor, Tensor], state: tuple[int, int, int, int]) -> bool:
        return self.ends[0] is ends[0] and self.ends[1] is ends[1] and self.state == state


_steps: WeakKeyDictionary[Any, dict[int | None, _Step]] = WeakKeyDictionary()
"""By cache and window, the latest step."""


def _mask(cache: Any, ends_q: Tensor, ends_k: Tensor, window: int | None, Q: int, K: int) -> Mask:
    held = _steps.setdefault(cache, {}).get(window)
    ends = ends_q, ends_k
    written = [0 if t.is_inference() else t._version for t in ends]
    state = Q, K, written[0], written[1]
    if held is not None and held.is_of(ends, state):
        return held.mask
    # Each text may see itself; its queries are the last of its tokens.
    inner = masks.causal() if window is None else masks.window(window - 1)
    mask = Packed(inner, _lengths(ends_q, Q), _lengths(ends_k, K))
    _steps[cache][window] = _Step(ends, state, mask)
    return mask


def _lengths(ends: Tensor, n: int) -> Tensor:
    """How long each text is. What fills up the row is one more, which nobody reads."""
    found = ends.to("cpu", torch.int64).diff()
    rest = n - int(found.sum())
    return torch.cat([found, found.new_tensor([rest])])


def read_pages(name: str, attend: Callable[..., Any]) -> None:
    """Let `generate_batch` take models that run by a name. transformers knows which do by a list of
    its own names (5.22), or by a prefix (before)."""
    prefixed = f"{PREFIX}sdpa" in AttentionInterface._global_mapping
    if prefixed:
        AttentionInterface.register(PREFIX + name, _only_pages(attend))
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager

        switch = ContinuousBatchingManager.switch_to_cb_friendly_attn
    except (ImportError, AttributeError):
        return

    @wraps(switch)
    def switch_or_stay(self: Any, model: Any, *args: Any, **options: Any) -> None:
        if model.config._attn_implementation != name:
            switch(self, model, *args, **options)
        elif prefixed:
            model.set_attn_implementation(PREFIX + name)
            self._original_attn_impl = name

    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_or_stay


def _only_pages(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of a name that no masks are made for: without pages nothing says which query sees
    which key."""

    def attend_pages(module: nn.Module, *tensors: Any, **told: Any) -> Any:
        if told.get("cache") is None:
            raise RegardError(
                f"{type(module).__name__} runs by a name for generate_batch alone",
                got=f"{PREFIX}…, and no pages",
                do='model.set_attn_implementation("regard")',
            )
        return attend(module, *tensors, **told)

    return attend_pages
