"""What a decoder's KV cache holds, and what reading it at every token costs."""

from __future__ import annotations

from typing import Any, NamedTuple

from regard.arguments import counted, described
from regard.cost.configuration import Configuration
from regard.errors import RegardError


class CacheBytes(NamedTuple):
    """The KV cache: keys and values."""

    per_token: int
    """Bytes that one more token takes, while no window is full."""
    in_context: int
    """Bytes of the whole context, over the whole batch. Layers with a window hold no more."""


class Decoding(NamedTuple):
    """One step that writes one token for each sequence of a batch."""

    flops: int
    bytes_moved: int
    """Weights once for the batch, the cache of every sequence."""
    batch: int

    def as_dict(self) -> dict[str, Any]:
        return {"flops": self.flops, "bytes_moved": self.bytes_moved, "batch": self.batch}


def cache_bytes(c: Configuration, context: int, batch: int = 1) -> CacheBytes:
    """The KV cache of a model: 2 (keys, values) · key heads · head width · bytes, for each layer.

    >>> from regard.cost import preset
    >>> cache_bytes(preset("llama-3-8b"), 131072).per_token
    131072
    """
    if not isinstance(c, Configuration):
        raise RegardError(
            "a cache is that of a model",
            got=described(c),
            accepted="a Configuration, as preset gives",
        )
    counted("context", context)
    counted("batch", batch)
    layer = 2 * c.key_heads * c.head_width * c.itemsize
    return CacheBytes(layer * c.layers, batch * layer * _held(c, context))


def decoding(c: Configuration, context: int, batch: int = 1) -> Decoding:
    """A step of decoding after so many tokens."""
    read = c.parameters_read(batch) * c.itemsize + cache_bytes(c, context, batch).in_context
    attending = 4 * c.heads * c.head_width * _held(c, context)
    return Decoding(batch * (2 * c.parameters_read() + attending), read, batch)


def _held(c: Configuration, context: int) -> int:
    """Tokens that the caches of all layers hold together."""
    return sum(
        layers * (context if window is None else min(context, window))
        for window, layers in c.layers_by_window().items()
    )
