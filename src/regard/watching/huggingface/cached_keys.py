"""Caches that choose what to keep by the weights: how they hear of the call their keys went into.

A cache of transformers is given keys and values, and never learns who looked at them. What
`update` returns are the very tensors that attention is called with next, so the call is known by
its keys.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from torch import Tensor

from regard.errors import RegardError
from regard.traces import Trace


@runtime_checkable
class ChoosingLayer(Protocol):
    """One layer of such a cache."""

    keys: Tensor | None

    def mask(self, query: Tensor, given: Tensor | None) -> Tensor | None:
        """The mask of the call, where that of the model speaks of keys that are gone."""
        ...

    def saw(self, trace: Trace) -> None:
        """What the call did: now something may go."""
        ...


_waiting: ContextVar[ChoosingLayer | None] = ContextVar("waiting", default=None)


def expect(layer: ChoosingLayer, cache: object) -> None:
    """The next call is about the keys of this layer. `cache` is what it belongs to: two layers of
    one cache in a row mean that the calls go elsewhere."""
    before = _waiting.get()
    if before is not None and getattr(before, "cache", None) is cache:
        _waiting.set(None)
        raise RegardError(
            "a cache that chooses by attention was not told of it",
            got="a model whose attention is not computed by regard",
            do='load it with attn_implementation="regard", or '
            'model.set_attn_implementation("regard")',
        )
    _waiting.set(layer)


def asker(
    key: Tensor, *, bias: Tensor | None, indices: Tensor | None, window: int | None
) -> ChoosingLayer | None:
    """The layer that waits for the call with these keys, if one does."""
    layer = _waiting.get()
    if layer is None or layer.keys is not key:
        return None
    _waiting.set(None)
    asked = {"position_bias": bias, "indices": indices, "sliding_window": window}
    if found := [name for name, given in asked.items() if given is not None]:
        raise RegardError(
            "a cache that lets keys go cannot place what a layer asks for by position",
            got=", ".join(found),
            do="use transformers' own cache for this model",
        )
    return layer
