"""Caches that choose what to keep by the weights: how they learn which call used their keys.

A cache of transformers is given keys and values, and never learns who looked at them. What
`update` returns are the very tensors that attention is called with next, so the call is known by
its keys.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable
from weakref import ReferenceType, ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.errors import RegardError
from regard.traces import Trace


@runtime_checkable
class ChoosingLayer(Protocol):
    """One layer of such a cache."""

    keys: Tensor | None
    cache: Any
    """What it belongs to; its `config` is the model's."""
    waits: bool
    """Whether keys have come, and the call that they go into was not seen."""

    def mask(self, query: Tensor, given: Tensor | None) -> Tensor | None:
        """The mask of the call, where that of the model speaks of keys that are gone."""
        ...

    def saw(self, trace: Trace) -> None:
        """The trace of the call: now keys may be dropped."""
        ...


# Weakly: a call that fails leaves its layer here.
waiting: ContextVar[ReferenceType[ChoosingLayer] | None] = ContextVar("waiting", default=None)
lent_masks: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The masks of calls over keys, by the keys: in some models other layers use them once more."""


def expect(layer: ChoosingLayer) -> None:
    """The next call is about the keys of this layer. Two layers of one cache in a row, or one
    twice, mean that the calls go elsewhere."""
    held = waiting.get()
    before = None if held is None else held()
    if layer.waits or (before is not None and before.waits and before.cache is layer.cache):
        waiting.set(None)
        raise _not_told(layer.cache)
    layer.waits = True
    waiting.set(ref(layer))


def asker(
    key: Tensor, bias: Tensor | None, indices: Tensor | None, window: int | None
) -> ChoosingLayer | None:
    """The layer that waits for the call with these keys, if one does."""
    held = waiting.get()
    layer = None if held is None else held()
    if layer is None or layer.keys is not key:
        return None
    waiting.set(None)
    asked = {"position_bias": bias, "indices": indices, "sliding_window": window}
    if found := [name for name, given in asked.items() if given is not None]:
        raise RegardError(
            "a cache that drops keys does not support what this layer asks for by position",
            got=", ".join(found),
            do="use transformers' own cache for this model",
        )
    return layer


def lend(key: Tensor, mask: Tensor) -> None:
    """The mask of a call over these keys, for layers that have none of their own."""
    lent_masks[key] = mask


def lent(key: Tensor, given: Tensor | None) -> Tensor | None:
    """The mask of a call: what was lent with its keys, or what the model gave."""
    # Its length would be counted: this is asked at every layer.
    mask: Tensor | None = lent_masks.get(key, given) if lent_masks.data else given
    return mask


def _not_told(cache: Any) -> RegardError:
    name = str(getattr(getattr(cache, "config", None), "_attn_implementation", None))
    if name.startswith("regard"):
        return RegardError(
            "a cache that chooses by attention was not told of it",
            got=f"a model with attn_implementation={name!r} whose attention was not called with "
            "the keys of its cache, or a call that failed",
            accepted="models that attend to the very keys that they cache; not latent attention "
            "(DeepSeek) or attention by hand (MPT)",
            do="after a call that failed, cache.reset(); for such a model, use transformers' own "
            "cache",
        )
    return RegardError(
        "a cache that chooses by attention was not told of it",
        got=f"a model whose attention is not computed by regard: attn_implementation={name!r}",
        do='load it with attn_implementation="regard", or '
        'model.set_attn_implementation("regard"), and cache.reset()',
    )
