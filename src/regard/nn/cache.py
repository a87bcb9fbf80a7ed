"""The KV cache: what a decoder keeps between steps, the keys and values of every token so far."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard import masks
from regard.errors import RegardError
from regard.masks import Mask
from regard.masks.algebra import And, Not, Or
from regard.masks.padding import Padding
from regard.masks.prefix import Prefix


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
        if window is not None and window < 0:
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
        if self.keys is not None and self.values is not None:
            _check_fits(self.keys, k)
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        new = k.shape[2] - len(self)
        start = 0 if self.window is None else max(k.shape[2] - self.window, 0)
        self.keys, self.values = k[:, :, start:], v[:, :, start:]
        self.position += new
        return k, v

    def limit(self, mask: Mask | None) -> Mask | None:
        """A mask for the keys so far with the window of this cache in it, or the reason why the
        two do not go together.

        >>> from regard import masks
        >>> Cache(window=4).limit(masks.causal())
        causal() & window(4, None)
        """
        if self.window is None:
            return None if mask is None else _so_far(mask)
        if mask is not None and not mask.relative and self.position > len(self):
            raise RegardError(
                f"{mask!r} names keys by their place, and this cache has let the first ones go",
                got=f"a cache that holds {len(self)} of {self.position} tokens",
                accepted="masks of distance alone: causal(), window(w), dilated(step)",
                do=f"use Cache() with & masks.window({self.window}) in the mask",
            )
        if mask is None:
            return masks.window(self.window)
        return _so_far(mask) & masks.window(self.window, None)

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
            "the cache remembers another call",
            got=f"keys {need} after keys {have}",
            accepted="one cache per attention module and batch",
            do="make a new Cache(), or cache.reset()",
        )
