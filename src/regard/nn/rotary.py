"""Rotary position embeddings (RoPE): pairs of numbers rotated, further with each position.

The dot product of a query rotated by m·θ and a key rotated by n·θ depends on (m - n)·θ: on their
distance alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.arguments import described, flag, is_number
from regard.errors import RegardError
from regard.values import whole


@dataclass(frozen=True)
class Rotary:
    """Rotates the numbers of each head: pair i at position n by n · base^(-2i / width).

    `width` rotates only the first numbers of a head and leaves the rest alone. Pairs are
    (i, i + half) as in Llama; `interleaved=True` pairs neighbours, (2i, 2i + 1), as in
    GPT-J.

    >>> import torch
    >>> Rotary()(torch.ones(1, 1, 3, 2))[0, 0]
    tensor([[ 1.0000,  1.0000],
            [-0.3012,  1.3818],
            [-1.3254,  0.4932]])
    """

    base: float = 10_000.0
    width: int | None = None
    interleaved: bool = False

    def __call__(self, x: Float[Tensor, "b h n d"], first: int = 0) -> Float[Tensor, "b h n d"]:
        """x rotated; its first entry stands at position `first`."""
        width = self.check(x.shape[-1])
        turned, rest = x[..., :width], x[..., width:]
        cos, sin = self._angles(x, first, width)
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            parts = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            parts = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([parts.to(x.dtype), rest], -1)

    def check(self, head_width: int) -> int:
        """How many numbers of a head are rotated; refuses what cannot be paired.

        >>> Rotary(width=32).check(64)
        32
        """
        if not (is_number(self.base) and 0 < self.base < math.inf):
            raise RegardError(
                "rotary positions turn by powers of a base",
                got=f"base={described(self.base)}",
                accepted="a number above 0",
            )
        flag("Rotary: interleaved", self.interleaved)
        width = head_width if self.width is None else whole("Rotary: width", self.width)
        if width % 2 or not 0 < width <= head_width:
            raise RegardError(
                "rotary positions turn pairs of numbers",
                got=f"a width of {width} in heads {head_width} wide",
                accepted=f"an even width, 2 to {head_width}",
                do="set Rotary(width=...) to turn only a part of each head",
            )
        return width

    def _angles(self, x: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
        # In float32 an angle at position 1,000,000 is off by up to 0.03.
        exact = torch.float32 if x.device.type == "mps" else torch.float64
        place = torch.arange(first, first + x.shape[-2], device=x.device, dtype=exact)
        step = torch.arange(0, width, 2, device=x.device, dtype=exact) / width
        angle = place[:, None] * self.base**-step
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return angle.cos().to(dtype), angle.sin().to(dtype)
