"""One layer of a cache that lets go of keys, by the attention they get."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from regard import masks
from regard.caches.policies import Policy
from regard.caches.slots import Slots
from regard.errors import RegardError
from regard.masks.algebra import And, Mask, pairs
from regard.masks.causal import Causal
from regard.masks.keep import Keep
from regard.masks.padding import Padding
from regard.traces import Trace
from regard.values import Shape
from regard.watching.huggingface import cached_keys
from regard.watching.huggingface.symbolic_mask import SymbolicMask

Changed = tuple[Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]


class EvictingLayer(DynamicLayer):  # type: ignore[misc]
    """The keys and values of one layer, of which a policy chooses some after every call."""

    is_croppable = False

    def __init__(self, policy: Policy, cache: object) -> None:
        super().__init__()
        self.policy, self.cache = policy, cache
        self.seen = 0
        self.slots: Slots | None = None

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
                "a cache that lets go of keys changes its size, which a graph cannot",
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
        self.seen += new
        cached_keys.expect(self, self.cache)
        return self.keys, self.values

    def mask(self, query: Tensor, given: Tensor | None) -> Tensor | None:
        """The mask of a call: of all keys that are held, those of the same head and text."""
        B, H, Q, _ = query.shape
        assert self.slots is not None
        if self.seen == Q:
            return given
        if Q > 1:
            _check_later(given, Q)
        mask: Mask | None = masks.causal() if Q > 1 else None
        if not self.slots.full:
            filled = self.slots.filled
            held = masks.keep(filled.repeat_interleave(H // filled.shape[1], 1)[:, :, None])
            mask = held if mask is None else mask & held
        shape = Shape(B, H, Q, self.slots.filled.shape[-1])
        return SymbolicMask.of(mask, shape, query.device)

    @torch.no_grad()
    def saw(self, trace: Trace) -> None:
        """Score the keys by what a call did, and let go of those that are over the budget."""
        slots = self.slots
        assert slots is not None
        padding = self._padding(trace)
        over = slots.filled.shape[-1] > self.policy.budget
        if over or self.policy.remembers:
            scores = self.policy.score(trace.detach(), slots.scores)
            over = over and scores is not None
            slots = slots if scores is None else slots.scored(scores)
        filled = slots.filled if padding is None else slots.filled & ~padding
        self.slots = slots
        if over:
            self._hold(self.policy.keep(slots.scores, filled))
        elif padding is not None:
            self._hold(filled)

    def _hold(self, keep: Tensor) -> None:
        assert self.slots is not None
        self.slots, columns = self.slots.pack(keep)
        self.keys, self.values = (
            t.gather(-2, columns[..., None].expand(-1, -1, -1, t.shape[-1]))
            for t in (self.keys, self.values)
        )

    def _padding(self, trace: Trace) -> Tensor | None:
        """Keys [B, 1, S] of a prompt that its last token may not see: nothing ever will."""
        Q = trace.inputs.shape.Q
        if self.seen != Q or trace.mask in (None, masks.causal()):
            return None
        hidden = (trace.logits(queries=[Q - 1])[:, :1, 0] == -torch.inf).contiguous()
        if bool(hidden[..., -1].any()):
            raise RegardError(
                "a text ends with padding, and what it would generate follows that",
                accepted="texts that are padded on the left, or one alone",
                do='tokenizer.padding_side = "left"',
            )
        return hidden if bool(hidden.any()) else None

    def get_seq_length(self) -> int:
        """How many tokens there were: the position of the next."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """How many keys a call will see, and where the first would stand if none were missing."""
        if isinstance(query_length, Tensor):  # transformers before 5.3: the queries' positions
            query_length = len(query_length)
        held = 0 if self.slots is None else self.slots.filled.shape[-1]
        return held + query_length, self.seen - held

    def reset(self) -> None:
        super().reset()
        self.seen, self.slots = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.slots is not None:
            raise RegardError(
                "a cache that lets go of keys cannot go back",
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


def _check_later(given: Tensor | None, Q: int) -> None:
    """Several tokens after others were let go: each may see what is held and those before it."""
    mask = given.mask if isinstance(given, SymbolicMask) else None
    parts = _parts(mask)
    known = isinstance(given, SymbolicMask) and all(
        isinstance(part, Causal | Keep | Padding) for part in parts
    )
    if known and isinstance(given, SymbolicMask) and mask is not None and len(parts) > 1:
        B, H, _, K = given.shape
        q, k = torch.tensor([Q - 1]), torch.arange(K - Q, K)
        bound = mask.bind(Shape(B, H, Q, K), given.device)
        known = bool(pairs(bound, q.to(given.device), k.to(given.device)).all())
    if not known:
        raise RegardError(
            f"{Q} more tokens come with a mask that a cache with missing keys cannot follow",
            got=repr(mask) if isinstance(given, SymbolicMask) else "a mask of all pairs",
            accepted="tokens that see all before them, without padding among them",
        )


def _parts(mask: Mask | None) -> list[Mask]:
    if isinstance(mask, And):
        return [*_parts(mask.left), *_parts(mask.right)]
    return [] if mask is None else [mask]
