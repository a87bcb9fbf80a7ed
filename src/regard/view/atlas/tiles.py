"""Tiles: 256 × 256 pooled cells of a map, as bytes.

At level z a cell is 2^z × 2^z pairs; those at the edge hold what is left. A tile carries the mean
and the largest weight of each cell, so that pooling is switched without asking again (a sum is the
mean times the pairs of a cell). On a card kernels pool as they go. Elsewhere a tile of too many
pairs is read in a draft first: some rows of each cell, which it says of itself; `exact=True` reads
them all, band by band.

The bytes, little-endian:

    kind      u8    0 nothing but zeros, 1 weights, 2 means and maxima
    unused    u8
    rows      u16
    columns   u16
    read      u16   rows read of each cell, 0 for all of them
    low       f32   natural logarithms of the values that codes 1 ...
    high      f32   ... and 255 stand for
    values          kind 1: f16[rows, columns]; kind 2: u8[2, rows, columns], the codes of the
                    means, 0 being zero, and how far those of the maxima are above them
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from regard.cancellation import UnwantedError
from regard.errors import RegardError
from regard.view.atlas.cores import one_core
from regard.view.atlas.maps import Map
from regard.view.atlas.tensor_bytes import to_bytes

SIDE = 256
HEADER = struct.Struct("<BBHHHff")
ZEROS, WEIGHTS, POOLED = 0, 1, 2
PAIRS = 1 << 22
"""How many pairs a draft reads, if it must not read more: tens of milliseconds on a CPU."""
CHUNK = 1 << 22
LEAST = 2.0**-24
"""The smallest number above zero that 16 bits hold."""
RANGE = math.log(1e6)
"""The smallest value that a code tells from the largest: a millionth of it."""

Go = Callable[[float], bool]


class CancelledError(UnwantedError):
    """The one who asked no longer wants the answer."""


def levels(queries: int, keys: int) -> int:
    """The level at which a whole map is one tile."""
    return max(0, math.ceil(math.log2(max(queries, keys, 1) / SIDE)))


def tile(
    of: Map,
    head: int,
    level: int,
    row: int,
    column: int,
    *,
    quantity: str = "weight",
    exact: bool = False,
    go: Go | None = None,
) -> bytes:
    """One tile. `go` is told the share done, and says whether to go on.

    >>> import regard, torch
    >>> from regard.view.atlas.atlas import Atlas
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> m = Atlas.of(regard.trace(x, x, x, mask=regard.masks.causal()))[0]
    >>> decoded(tile(m, 0, 0, 0, 0)).mean[3]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    >>> pooled(m, 0, range(4), range(4), cell=2)[0]
    tensor([[0.5000, 0.0000],
            [0.2917, 0.2083]])
    """
    _, Q, K = of.shape
    highest = levels(Q, K)
    cell = 1 << min(max(level, 0), highest)
    queries = _part(row, cell, Q)
    keys = _part(column, cell, K)
    if not 0 <= level <= highest or not queries or not keys:
        raise RegardError(
            "there is no such tile",
            got=f"level {level}, row {row}, column {column}",
            accepted=f"levels 0 to {highest} of {Q} × {K} pairs",
        )
    if level > 0 and quantity == "weight" and (found := of.pooled(head, queries, keys, cell)):
        return encoded(*found, 0)
    # All drafts of a level read alike, or their edges would show.
    read = cell if exact else min(cell, max(1, PAIRS // (SIDE * SIDE * cell)))
    quick = read * cell * SIDE * SIDE <= 2 * PAIRS
    with one_core() if quick else nullcontext():
        if level == 0:
            return encoded_weights(of.weights(head, queries, keys, quantity))
        mean, most = pooled(of, head, queries, keys, cell, quantity, read=read, go=go)
        return encoded(mean, most, 0 if read == cell else read)


def pooled(
    of: Map,
    head: int,
    queries: range,
    keys: range,
    cell: int,
    quantity: str = "weight",
    *,
    read: int | None = None,
    go: Go | None = None,
) -> tuple[Float[Tensor, "rows columns"], Float[Tensor, "rows columns"]]:
    """Mean and largest weight of each cell, from so many of its rows, all by default."""
    rows = -(-len(queries) // cell)
    columns = -(-len(keys) // cell)
    mean, most = torch.zeros(rows, columns), torch.zeros(rows, columns)
    read = cell if read is None else read
    # Thin bands: keys that are masked for all of their rows are not computed.
    here = max(1, min(rows // 8, CHUNK // max(1, read * len(keys))))
    for start in range(0, rows, here):
        if go is not None and not go(start / rows):
            raise CancelledError
        stop = min(start + here, rows)
        first = queries.start + start * cell
        span = range(first, min(queries.start + stop * cell, queries.stop))
        shown = of.span(span, keys)
        # Whole cells, so that means count masked pairs.
        low = (shown.start - keys.start) // cell if shown else 0
        high = -(-(shown.stop - keys.start) // cell) if shown else 0
        if low >= high:
            continue
        part = range(keys.start + low * cell, min(keys.start + high * cell, keys.stop))
        for sample, band in _samples(span, cell, read):
            p = of.weights(head, sample, part, quantity).nan_to_num_(0.0)
            p = torch.nn.functional.pad(p, (0, (high - low) * cell - len(part)))
            p = p.view(len(p), high - low, cell)
            at = slice(start + band.start, start + band.stop)
            each = len(p) // len(band)
            mean[at, low:high] = p.sum(-1).view(len(band), each, -1).mean(1)
            most[at, low:high] = p.amax(-1).view(len(band), each, -1).amax(1)
    widths = torch.tensor([min(cell, len(keys) - c * cell) for c in range(columns)])
    return mean / widths, most


def _samples(span: range, cell: int, read: int) -> list[tuple[Sequence[int], range]]:
    """Which rows to read of some rows of cells: the whole cells, then what is left."""
    whole = len(span) // cell
    found: list[tuple[Sequence[int], range]] = []
    if whole:
        body = range(span.start, span.start + whole * cell)
        if read < cell:
            picks = [
                body.start + c * cell + (2 * i + 1) * cell // (2 * read)
                for c in range(whole)
                for i in range(read)
            ]
            found.append((picks, range(whole)))
        else:
            found.append((body, range(whole)))
    left = range(span.start + whole * cell, span.stop)
    if left:
        found.append((left, range(whole, whole + 1)))
    return found


def halves(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In 16 bits, three digits from 6·10⁻⁵ on. What is not zero does not become zero."""
    return torch.where(values > 0, values.to(torch.float16).clamp_min(LEAST), 0)


def encoded_weights(values: Float[Tensor, "rows columns"]) -> bytes:
    """A tile of single pairs."""
    rows, columns = values.shape
    half = halves(values)
    if not half.any():
        return HEADER.pack(ZEROS, 0, rows, columns, 0, 0.0, 0.0)
    head = HEADER.pack(WEIGHTS, 0, rows, columns, 0, 0.0, 0.0)
    return head + to_bytes(half)


def encoded(
    mean: Float[Tensor, "rows columns"], most: Float[Tensor, "rows columns"], read: int
) -> bytes:
    """A tile of pooled cells, on a logarithmic scale of its own."""
    rows, columns = mean.shape
    largest = float(most.max()) if most.numel() else 0.0
    if largest <= 0.0:
        return HEADER.pack(ZEROS, 0, rows, columns, read, 0.0, 0.0)
    high = math.log(largest)
    # The range is of what the header can say: codes are made with the numbers they are read with.
    high = struct.unpack("<f", struct.pack("<f", high))[0]
    both = torch.stack([mean, most]).double()
    positive = both[both > 0]
    low = max(high - RANGE, math.log(float(positive.min())))
    low = struct.unpack("<f", struct.pack("<f", low))[0]
    head = HEADER.pack(POOLED, 0, rows, columns, read, low, high)
    code = codes(both, low, high)
    return head + to_bytes(torch.stack([code[0], code[1] - torch.minimum(code[0], code[1])]))


def codes(values: Tensor, low: float, high: float) -> UInt8[Tensor, "..."]:
    """Each value's place between the logarithms low and high, from 1 to 255; 0 for zero."""
    place = (values.clamp_min(1e-300).log() - low) / max(high - low, 1e-9)
    return torch.where(values > 0, 1 + (place * 254).round().clamp(0, 254), 0).to(torch.uint8)


class Decoded:
    """A tile read again: what a front end makes of it, for tests and for Python."""

    def __init__(self, data: bytes) -> None:
        kind, _, rows, columns, self.read, low, high = HEADER.unpack_from(data)
        self.mean = self.most = torch.zeros(rows, columns)
        body = bytearray(data[HEADER.size :])
        if kind == WEIGHTS:
            half = torch.frombuffer(body, dtype=torch.float16)
            self.mean = self.most = half.view(rows, columns).float()
        elif kind == POOLED:
            code = torch.frombuffer(body, dtype=torch.uint8).view(2, rows, columns)
            code[1] += code[0]
            value = (low + (code.double() - 1) / 254 * (high - low)).exp()
            self.mean, self.most = torch.where(code > 0, value, 0.0).float()


def decoded(data: bytes) -> Decoded:
    """Read a tile."""
    return Decoded(data)


def _part(place: int, cell: int, n: int) -> range:
    if place < 0:
        return range(0)
    return range(min(place * SIDE * cell, n), min((place + 1) * SIDE * cell, n))
