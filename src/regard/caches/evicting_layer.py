"""One layer of a cache that lets go of keys, by the attention they get."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from regard.caches import held_mask
from regard.caches.policies import Policy
from regard.caches.slots import Slots
from regard.errors import RegardError
from regard.traces import Trace
from regard.watching.huggingface import cached_keys

Changed = tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]


class EvictingLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one layer, of which a policy chooses some after every call."""

    is_croppable = False

    def __init__(self, policy: Policy, cache: object) -> None:
        super().__init__()
        self.policy, self.cache = policy, cache
        self.seen = self.new = 0
        self.slots: Slots | None = None
        self.padding: Tensor | None = None
        self.waits = False

    @property
    def positions(self) -> Int32[Tensor, "b g s"] | None:
        """The position of the token in each slot of each key head; -1 where a slot holds none."""
        if self.slots is None:
            return None
        return torch.where(self.slots.filled, self.slots.positions, -1)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Changed:
        """Hold new keys and values; the call they go into is waited for."""
        if torch.compiler.is_compiling():
            raise RegardError(
                "a cache that drops keys changes its size, which a compiled graph cannot",
                do="generate with disable_compile=True, or do not compile the model",
            )
        if self.slots is None:
            self.lazy_initialization(key_states, value_states)
            self.slots = Slots.none(key_states)
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], -2)
            self.values = torch.cat([self.values, value_states], -2)
        new = key_states.shape[-2]
        self.slots = self.slots.append(new, self.seen)
        self.seen, self.new = self.seen + new, new
        cached_keys.expect(self)
        return self.keys, self.values

    def mask(self, query: Tensor, given: Tensor | None) -> Tensor | None:
        """The mask of a call: of all keys that are held, those that the model's mask shows."""
        Q = query.shape[2]
        assert self.slots is not None
        if self.new != Q:
            raise RegardError(
                "a cache that drops keys was given those of another text",
                got=f"{self.new} new keys for {Q} queries: cross-attention",
                accepted="the keys of the text that the queries are of",
                do="past_key_values=EncoderDecoderCache(EvictingCache(model, policy), "
                "DynamicCache())",
            )
        if self.seen == Q:
            self.padding = held_mask.padding(given)
            return given
        self.padding = None
        mask = held_mask.over_held(given, self.slots, query, self.seen)
        cached_keys.lend(self.keys, mask)
        return mask

    def saw(self, trace: Trace) -> None:
        """Score the keys by what a call did, and let go of those that are over the budget."""
        self.waits = False
        keep = self._chosen(trace)
        if keep is not None:
            self._hold(keep)

    @torch.no_grad()
    def _chosen(self, trace: Trace) -> Tensor | None:
        """The slots that stay, where some go. Keys that stay keep their gradients; choosing has
        none."""
        slots, padding = self.slots, self.padding
        assert slots is not None
        over = slots.filled.shape[-1] > self.policy.budget
        if over or self.policy.remembers:
            scores = self.policy.score(trace.detach(), slots.scores)
            over = over and scores is not None
            slots = slots if scores is None else slots.scored(scores)
        filled = slots.filled if padding is None else slots.filled & ~padding
        self.slots = slots
        if over:
            return self.policy.keep(slots.scores, filled)
        return None if padding is None else filled

    def _hold(self, keep: Tensor) -> None:
        assert self.slots is not None
        self.slots, columns = self.slots.pack(keep)
        self.keys, self.values = (
            t.gather(-2, columns[..., None].expand(-1, -1, -1, t.shape[-1]))
            for t in (self.keys, self.values)
        )

    def get_seq_length(self) -> int:
        """How many tokens there were: the position of the next."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """The model makes its mask for all keys there were; `mask` takes what is held."""
        if isinstance(query_length, Tensor):  # transformers before 5.3: the queries' positions
            query_length = len(query_length)
        return self.seen + query_length, 0

    def reset(self) -> None:
        super().reset()
        self.seen, self.slots, self.waits = 0, None, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.slots is not None:
            raise RegardError(
                "a cache that drops keys cannot be cropped",
                got=f"crop({tokens_to_remove})",
                do="generate without an assistant, or with transformers' own cache",
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._along_batch(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._along_batch(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._along_batch(lambda t: t[indices])

    def _along_batch(self, change: Any) -> None:
        if self.slots is not None:
            self.keys, self.values = change(self.keys), change(self.values)
            self.slots = self.slots.change(change)

    def nbytes(self) -> int:
        """What the layer holds: keys, values, and what is known of them."""
        if self.slots is None:
            return 0
        return int(self.keys.nbytes + self.values.nbytes) + self.slots.nbytes()
