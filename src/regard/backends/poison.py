"""What a NaN or an infinity among the values does to the rows that see it, and to no other.

0 · NaN is NaN, so a masked value that is not finite would spoil the products it takes no part in.
Products are therefore made with finite stand-ins, and this is added afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def finite(t: Tensor) -> Tensor:
    """0 in place of what is not finite."""
    return t.masked_fill(~t.isfinite(), 0.0)


def all_finite(*tensors: Tensor) -> bool:
    """Whether no entry is NaN or infinite. A sum is not finite if a term is not; one that
    overflows on its own merely has care taken in vain."""
    for t in tensors:
        half = t.dtype in (torch.float16, torch.bfloat16)
        total = t.sum(dtype=torch.float32) if half else t.sum()
        if not math.isfinite(total.item()):
            return False
    return True


def poison(v: Tensor, seen: Callable[[Tensor], Tensor]) -> Tensor:
    """NaN or infinity for rows that see one, 0 for others.

    `seen` tells from numbers per key [..., K, E] which rows see one above 0: [..., Q, E].
    """

    def sees(what: Tensor) -> Tensor:
        return seen(what.to(v.dtype))

    bad = torch.where(sees(v == math.inf), math.inf, 0.0)
    bad = bad - torch.where(sees(v == -math.inf), math.inf, 0.0)
    return torch.where(sees(v.isnan()), math.nan, bad).to(v.dtype)
