"""How a plain call is cut, and what multiplies its matrices: settled once, for both passes."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

import torch

from regard.backends.tiled.loop import Loop
from regard.backends.tiled.tiles import TileSize, takes_all
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask

SLAB = 1 << 22
"""Numbers of q, or of k, in a slab, unless that leaves too few heads for all threads."""
ALONE = 1 << 18
"""Multiplications that are not worth waking a second thread for."""
WAKING = 1 << 14
"""Multiplications of one row, from which on its product wakes other threads: for each head anew,
which takes ten times as long as the rest."""
TOGETHER = 1 << 28
"""Multiplications of all batch entries, up to which what a mask spares is less than what it takes
to look for it."""
PACKED_ROWS = 32
"""Rows that look at the same keys, from which on packing these pays."""
PACKED_KEYS = 64
"""Keys are packed in runs of a multiple of this (KEYS in packed.h)."""
HANDS = 8
"""Copies of the gradients of keys and values at most, one for each thread that adds to them."""
SHARES = 8
"""Heads for each thread, from which on it matters little that one has more of them."""


def fused_size(x: AttentionInputs) -> TileSize:
    """Tiles of logits that fit the cache of one core, and heads enough for all of them."""
    Q, K, D = x.q.shape[2], x.k.shape[2], x.q.shape[3]
    # Half precision is copied to float32 slab by slab, so a slab is not everything at once.
    heads = SLAB // (max(Q * x.group, K) * D)
    rows = 256 if Q >= 4096 or _as_one_tile(x) else 128
    return TileSize(max(4 * torch.get_num_threads(), heads), rows, 512)


def _as_one_tile(x: AttentionInputs) -> bool:
    """Whether all rows are sooner computed together than it is found out what a mask leaves to
    some. (A band says so by itself.)"""
    B, H, Q, K = x.shape
    listed = x.mask is not None and x.mask.band() is None
    short = 128 < Q <= 256 and B * H * Q * K * (x.q.shape[-1] + x.v.shape[-1]) <= TOGETHER
    return listed and short and takes_all(x, 256)


def even(width: int) -> int:
    return width + width % 2


class Product(Enum):
    """What multiplies matrices: of float32, of narrow numbers, or of those that were packed."""

    FLOATS = auto()
    HALVES = auto()
    PACKED = auto()


def product_of(x: AttentionInputs, loop: Loop) -> Product:
    dtype = x.q.dtype
    if dtype != x.k.dtype or dtype != x.v.dtype:
        return Product.FLOATS
    # Without oneDNN, which can be switched off, PyTorch has no such product.
    can_pack = dtype in loop.multiply_packed and torch._C._get_mkldnn_enabled()
    if can_pack and min(x.shape.Q * x.group, x.shape.K) >= PACKED_ROWS:
        return Product.PACKED
    return Product.HALVES if dtype in loop.multiply_halves else Product.FLOATS


class Plan(NamedTuple):
    """How a call is cut, settled once."""

    B: int
    H: int
    Q: int
    K: int
    G: int
    D: int
    E: int
    band: tuple[int, int] | None
    """The least and the largest key - query that may be seen, if that says everything."""
    size: TileSize
    rows: int
    keys: int
    threads: int
    dtype: torch.dtype
    product: Product
    capped: bool = False

    @classmethod
    def of(cls, x: AttentionInputs, loop: Loop) -> Plan:
        """Tiles, and threads for what is worth them."""
        B, H, Q, D = x.q.shape
        _, G, K, E = x.v.shape
        # Unless several threads are at work, a product of one long row wakes others by itself.
        few = B * H * Q * K * D < ALONE and not (x.group * Q == 1 < B * H and K * D >= WAKING)
        threads = 1 if few else torch.get_num_threads()
        size, band, product = fused_size(x), _band(x.mask, Q, K), product_of(x, loop)
        keys = min(size.keys, K)
        if product is Product.PACKED:
            keys = -(-keys // PACKED_KEYS) * PACKED_KEYS
            # Wide rows pay for more of them: packed keys are read once for each tile.
            rows = min(size.rows, 64 if D <= 64 else 128) if Q < 512 else size.rows
            while rows > 32 and 4 * threads * rows > B * H * Q:
                rows //= 2
            size = replace(size, rows=rows)
        capped = x.softcap is not None
        return cls(
            B, H, Q, K, G, D, E, band, size, size.rows, keys, threads, x.q.dtype, product, capped
        )  # fmt: skip

    @property
    def group(self) -> int:
        return self.H // self.G

    @property
    def narrow(self) -> bool:
        """Whether matrices are multiplied as they were given, and what comes out is as narrow."""
        return self.product is not Product.FLOATS

    @property
    def multiplied(self) -> str:
        """What is multiplied, if it is not float32, in words."""
        dtype = str(self.dtype).removeprefix("torch.")
        packed = "packed " if self.product is Product.PACKED else ""
        return f", of {packed}{dtype} matrices" if self.narrow else ""

    @property
    def narrow_backward(self) -> bool:
        """The same in the backward pass; gradients of float16 logits can be too small for it, and
        those of capped ones are multiplied once more."""
        return self.product is Product.PACKED and self.dtype == torch.bfloat16 and not self.capped

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and keys that a tile has room for (see products.h)."""
        if self.product is not Product.PACKED:
            return self.rows, self.keys
        return -(-self.rows // 16) * 16, self.keys + PACKED_KEYS

    @property
    def scratch(self) -> int:
        """Numbers held for all threads: a tile of logits, one of queries, three sums of rows, and
        what is mixed if that becomes narrow."""
        rows, keys = self.tile
        return self.threads * rows * (keys + self.D + 3 + (self.E if self.narrow else 0))

    @property
    def hands(self) -> int:
        """How many copies of the gradients of keys and values are added up, each by one thread."""
        few = 4 * self.threads > self.B * self.G
        return min(self.threads, HANDS, -(-self.Q // self.rows)) if few else 1

    @property
    def backward_scratch(self) -> int:
        """Numbers held for all threads in the backward pass: two tiles of logits, and one half as
        large; queries, gradients of outputs, and of queries; a tile of a soft-cap's slopes."""
        rows, keys = self.tile
        slopes = keys if self.capped else 0
        return self.threads * rows * (slopes + 5 * keys // 2 + 2 * even(self.D) + even(self.E))

    def whole_heads(self, heads: int) -> bool:
        """Whether each thread takes all rows of one of so many key heads after the other, and packs
        its keys for itself: nobody waits until all keys are packed, and memory for one head's is
        enough. Not where threads would be left without work."""
        if self.product is not Product.PACKED:
            return False
        if self.group * self.Q <= self.rows:
            return True
        share, left = divmod(heads, self.threads)
        return self.keys >= self.K and (share >= SHARES or (share > 0 and left == 0))

    def packed_heads(self, heads: int) -> int:
        """How many key heads there must be room for, of so many that are packed."""
        return min(heads, self.threads) if self.whole_heads(heads) else heads

    @property
    def runs(self) -> int:
        """Keys in all runs that are packed, those that fill up the last one included."""
        return -(-self.K // self.keys) * self.keys

    @property
    def held(self) -> int:
        """All memory that the forward pass takes, in float32 numbers."""
        packed = self.runs * (even(self.D) + self.E) if self.product is Product.PACKED else 0
        return self.scratch + self.packed_heads(self.B * self.G) * packed // 2

    @property
    def pairs(self) -> int | None:
        """Pairs computed under a band or no mask; None where the mask is another."""
        if self.band is None:
            return None
        low, high = self.band
        pairs = 0
        for start in range(0, self.Q, self.rows):
            stop = min(start + self.rows, self.Q)
            pairs += (stop - start) * max(0, min(self.K, stop + high) - max(0, start + low))
        return self.B * self.H * pairs


def _band(mask: Mask | None, Q: int, K: int) -> tuple[int, int] | None:
    if mask is None:
        return -Q, K
    band = mask.band()
    if band is None:
        return None
    low, high = band
    return int(min(max(low, -Q), K)), int(max(min(high, K), -Q - 1))
