"""A KV cache for transformers that keeps what is looked at."""

from __future__ import annotations

from typing import Any

from jaxtyping import Int32
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from regard.caches.evicting_layer import EvictingLayer
from regard.caches.policies import Policy
from regard.errors import RegardError


class EvictingCache(Cache):  # type: ignore[misc]
    """A cache that holds a budget of tokens, chosen by the attention they get, on the fused path.

    For models with `attn_implementation="regard"`; given to `generate` or to the model as
    `past_key_values`. Tokens that stay keep their position. Layers with a window of their own hold
    that window, as they do in transformers' cache. Batches may be padded on the left.

    >>> import torch, transformers, regard
    >>> from regard import caches
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="regard",
    ...     eos_token_id=None,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> cache = caches.EvictingCache(model, caches.HeavyHitters(8, recent=4))
    >>> text = torch.arange(20)[None]
    >>> model.generate(text, past_key_values=cache, max_new_tokens=5, pad_token_id=0).shape
    torch.Size([1, 25])
    >>> cache.get_seq_length(), cache.positions(0).shape
    (24, torch.Size([1, 2, 8]))
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        if isinstance(policy, type) or not isinstance(policy, Policy):
            raise RegardError(
                "policy= is the rule by which keys are dropped",
                got=repr(policy),
                accepted="HeavyHitters(...), WindowVotes(...) or PerHead(...) of regard.caches",
            )
        config = getattr(model, "config", model)
        layers = DynamicCache(config=config).layers
        if not any(type(layer) is DynamicLayer for layer in layers):
            raise RegardError(
                "no layer of this model keeps all its tokens",
                got=", ".join(sorted({type(layer).__name__ for layer in layers})),
                accepted="layers of full attention, whose cache grows with the text",
                do="use transformers' own cache",
            )
        super().__init__(
            layers=[
                EvictingLayer(policy, self) if type(layer) is DynamicLayer else layer
                for layer in layers
            ]
        )
        self.policy, self.config = policy, config

    def positions(self, layer: int) -> Int32[Tensor, "b g s"]:
        """The positions of the tokens that each key head of a layer holds, in order; heads that
        hold fewer than others have -1 before them."""
        held = getattr(self.layers[layer], "positions", None)
        if held is None:
            raise RegardError(
                "no positions are known of this layer",
                got=f"layer {layer}: {type(self.layers[layer]).__name__}",
                accepted="a layer of full attention, after the model has run",
            )
        return held  # type: ignore[no-any-return]

    def nbytes(self) -> int:
        """How many bytes all layers hold: keys, values, scores and positions."""
        return sum(
            layer.nbytes() if isinstance(layer, EvictingLayer) else _bytes(layer)
            for layer in self.layers
        )

    def __repr__(self) -> str:
        return f"EvictingCache({self.policy!r}, {len(self.layers)} layers)"


def _bytes(layer: Any) -> int:
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(t.nbytes for t in held if isinstance(t, Tensor))
