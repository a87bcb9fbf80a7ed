"""Which weights dropout drops: a pure function of seed and place.

Because nothing is drawn in order, every backend, tile size and backward pass drops the same pairs.
"""

from __future__ import annotations

from jaxtyping import Bool, Int
from torch import Tensor


def kept(
    seed: Int[Tensor, ""],
    share: float,
    b: Int[Tensor, "b"],
    h: Int[Tensor, "h"],
    q: Int[Tensor, "q"],
    k: Int[Tensor, "k"],
) -> Bool[Tensor, "b h q k"]:
    """True where a weight stays, when `share` of them are dropped."""
    word = _mixed(seed.to(q.device) + b)[:, None]
    word = _mixed(word + h)[..., None]
    word = _mixed(word + q)[..., None]
    word = _mixed(word + k)
    return word >= int(share * 2**32)


def _mixed(word: Tensor) -> Tensor:
    """A 32-bit finaliser (the one of MurmurHash3): every input bit moves every output bit."""
    low = 0xFFFFFFFF
    word = (word + 0x9E3779B9) & low
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & low
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & low
    return word ^ (word >> 16)
