"""The KV cache: what a decoder keeps between steps, the keys and values of every token so far."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard import masks
from regard.biases.bias import Bias
from regard.biases.pairwise import Pairwise
from regard.errors import RegardError
from regard.masks import Mask
from regard.masks.algebra import And, Not, Or
from regard.masks.padding import Padding
from regard.masks.prefix import Prefix
from regard.values import whole


class Cache:
    """The keys and values of one attention module, so that a step costs one token, not all.

    Queries of a step stand at the end of the keys, which is how `masks.causal()` and
    `masks.window(w)` align by themselves. `Cache(window=w)` holds only the last w tokens and lets
    each query see w keys besides itself, as `masks.window(w)` does.

    >>> import torch
    >>> from regard import masks, nn
    >>> attention, cache = nn.MultiHeadAttention(16, 2), nn.Cache(window=4)
    >>> for _ in range(6):
    ...     y = attention(torch.randn(1, 1, 16), mask=masks.causal(), cache=cache)
    >>> len(cache), cache.position
    (4, 6)
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None and whole("Cache: window", window) < 0:
            raise RegardError(
                "Cache: window counts tokens besides the query itself",
                got=f"window={window}",
                accepted="0 or more, or None to keep all",
            )
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget everything.

        >>> cache = Cache()
        >>> cache.reset()
        >>> cache
        Cache(holds 0 of 0)
        """
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.position = 0

    def append(
        self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"]
    ) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k e"]]:
        """Remember new keys and values; returns all that the new queries may need.

        >>> import torch
        >>> cache = Cache()
        >>> _ = cache.append(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
        >>> cache.append(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))[0].shape
        torch.Size([1, 2, 6, 8])
        """
        k, v = self.joined(k, v)
        self.hold(k, v)
        return k, v

    def joined(
        self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"]
    ) -> tuple[Float[Tensor, "b g k d"], Float[Tensor, "b g k e"]]:
        """What is held with new keys and values behind it. Nothing is remembered yet.

        >>> import torch
        >>> cache = Cache()
        >>> _ = cache.joined(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
        >>> cache
        Cache(holds 0 of 0)
        """
        if self.keys is None or self.values is None:
            return k, v
        _check_fits(self.keys, k)
        return torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)

    def hold(self, k: Float[Tensor, "b g k d"], v: Float[Tensor, "b g k e"]) -> None:
        """Remember what `joined` gave, once the call that it was for is done.

        >>> import torch
        >>> cache = Cache(window=3)
        >>> cache.hold(*cache.joined(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8)))
        >>> cache
        Cache(holds 3 of 5, window=3)
        """
        self.position += k.shape[2] - len(self)
        start = 0 if self.window is None else max(k.shape[2] - self.window, 0)
        self.keys, self.values = k[:, :, start:], v[:, :, start:]

    def limit(self, mask: Mask | None, bias: Bias | None = None) -> Mask | None:
        """A mask for the keys so far with the window of this cache in it, or the reason why the
        two, or a bias and it, do not go together.

        >>> from regard import masks
        >>> Cache(window=4).limit(masks.causal())
        causal() & window(4, None)
        """
        if self.window is None:
            return None if mask is None else _so_far(mask)
        if self.position > len(self):
            self._refuse_places(mask, bias)
        if mask is None:
            return masks.window(self.window)
        return _so_far(mask) & masks.window(self.window, None)

    def _refuse_places(self, mask: Mask | None, bias: Bias | None) -> None:
        """Refuse what counts keys from the first one, which is gone."""
        accepted, instead = "masks of distance alone: causal(), window(w), dilated(step)", ""
        wrong: Mask | Bias | None = None
        if mask is not None and not mask.relative:
            wrong = mask
        elif isinstance(bias, Pairwise):
            wrong, accepted = bias, "biases of distance alone: alibi(slopes), relative(table)"
        elif (mask is not None and _has_offset(mask)) or (bias is not None and _has_offset(bias)):
            wrong = mask if mask is not None and _has_offset(mask) else bias
            accepted = "masks and biases without offset="
            instead = "leave out offset=: queries stand at the end of the keys"
        if wrong is None:
            return
        raise RegardError(
            f"{wrong!r} names keys by their position, and this cache has dropped the first ones",
            got=f"a cache that holds {len(self)} of {self.position} tokens",
            accepted=accepted,
            do=instead or f"use Cache() with & masks.window({self.window}) in the mask",
        )

    def reorder(self, index: Int[Tensor, "b"]) -> None:
        """Continue with other batch entries, as beam search does.

        >>> import torch
        >>> cache = Cache()
        >>> k, _ = cache.append(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4))
        >>> cache.reorder(torch.tensor([1, 1, 0]))
        >>> bool((cache.keys[0] == k[1]).all())
        True
        """
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[index], self.values[index]

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"Cache(holds {len(self)} of {self.position}{window})"


def _has_offset(rule: Mask | Bias) -> bool:
    """Whether a rule says where the first query stands among the keys."""
    match rule:
        case And() | Or():
            return _has_offset(rule.left) or _has_offset(rule.right)
        case Not():
            return _has_offset(rule.mask)
    return getattr(rule, "offset", None) is not None


def _so_far(mask: Mask) -> Mask:
    """The mask of whole sequences while they grow: a length that is not reached yet masks nothing,
    which `padding` would refuse."""
    match mask:
        case Padding():
            return Prefix(mask.limit)
        case And() | Or():
            return type(mask)(_so_far(mask.left), _so_far(mask.right))
        case Not():
            return Not(_so_far(mask.mask))
    return mask


def _check_fits(held: Tensor, new: Tensor) -> None:
    have, need = (f"[B {t.shape[0]}, heads {t.shape[1]}, width {t.shape[3]}]" for t in (held, new))
    if have != need:
        raise RegardError(
            "the cache holds keys of another call",
            got=f"keys {need} after keys {have}",
            accepted="one cache per attention module and batch",
            do="make a new Cache(), or cache.reset()",
        )
