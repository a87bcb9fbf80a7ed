"""Which tile sizes, warps and pipeline depths a call runs with: a small table by shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from regard.backends.triton import cudnn
from regard.backends.triton.arguments import (
    describable,
    generation,
    heads_as_rows,
    tiles_of,
    wide,
)
from regard.backends.triton.layout import is_compact, is_simple, sees_all
from regard.backends.triton.settings.cards import card_of
from regard.backends.triton.settings.shared_memory import (
    Row,
    Tiled,
    fitting,
    of_forward,
    of_key_gradients,
    of_query_gradients,
    of_second_pass,
)
from regard.biases.alibi import Alibi
from regard.biases.dense import Dense
from regard.biases.relative import Relative
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot

Precision = Literal["tf32", "tf32x3", "ieee"]

FEW = 16
"""Queries up to which a tile for one head alone would be nearly empty."""
SMALL = 2e9
"""Multiplications below which a card is sooner done than Python with another launch."""
WORK = 5e9
"""Multiplications from which on a card takes longer for a call than it takes to reach cuDNN, some
50 µs more than a kernel of our own."""
TRAINED = 1e11
"""Multiplications up to which training waits longer for Python than a quicker kernel gains."""
LONG = {64: 2048, 128: 2048, 256: 4096}
"""By the width of tiles, tokens from which on the kernel for Hopper is the quickest there."""
SHORT = 8192
"""Queries up to which heads of 128 gain more from a second place for queries than from a third
stage of keys and values."""
CAP = 100.0
"""The largest soft-cap whose roundings on Hopper are as small as those of products."""

CHECKED = 256
"""Bytes of a row of values beyond which tensor memory does not hold the products of a tile that is
checked for hidden NaN, at once or where it is mended."""


@dataclass(frozen=True)
class Forward(Tiled):
    """How the forward kernel runs."""

    packed: bool = False
    splits: int = 1
    described: bool = False
    hopper: bool = False
    """Whether the kernel for Hopper runs, which must fit; `warps` is not its affair."""
    queued: bool = False
    """Whether it copies the queries of the next tile while it attends to those of one, and the copy
    engine writes the output."""
    cudnn: bool = False
    """Whether cuDNN attends, and the kernel only mends what a hidden NaN spoiled."""
    careful: bool = False
    """Whether hidden NaN are kept out at once: one launch instead of three, and more products."""
    precision: Precision = "ieee"
    registers: int | None = None
    """What a thread may use at most, so that more programs share a multiprocessor."""


BY_CUDNN = Forward(64, 64, warps=4, cudnn=True)


def fits_hopper(x: AttentionInputs) -> bool:
    """Whether a call is one that the kernels for Hopper take, on such a card."""
    assert isinstance(x.comparison, Dot)
    return (
        generation(x.q.device) == 9
        and x.q.dtype != torch.float32
        # Narrow heads would leave half of its products empty.
        and all(32 < t.shape[-1] <= 256 and t.shape[-1] % 8 == 0 for t in (x.q, x.v))
        and x.comparison.scale > 0
        and (x.bias is None or isinstance(x.bias, Alibi))
        and (x.softcap is None or x.softcap <= CAP)
        and is_compact(x.mask, x.shape, x.q.device)
        and all(describable(t) for t in (x.q, x.k, x.v))
    )


def outruns_cudnn(x: AttentionInputs) -> bool:
    """Whether the output alone comes sooner from ours, measured on an H200."""
    if x.dropout:
        return False
    if fits_hopper(x) and min(x.shape.Q, x.shape.K) >= LONG[_width(x)]:
        return True
    return _heads_fill_hopper(x)


def trained_by_cudnn(x: AttentionInputs) -> bool:
    """Whether a call of which the output is wanted and q, k or v learn is cuDNN's in both passes:
    PyTorch's autograd then calls it sooner than ours can, which long texts do not notice."""
    return (
        x.mask is not None
        and cudnn.runs_forward(x)
        and cudnn.runs_output_backward(x)
        and (_multiplications(x) < TRAINED or not outruns_cudnn(x))
    )


def _width(x: AttentionInputs) -> int:
    """Of tiles: a power of two that holds queries, keys and values."""
    return max(wide(x.q.shape[-1]), wide(x.v.shape[-1]))


def forward_settings(x: AttentionInputs, *, statistics: bool) -> Forward:
    """What runs best on Hopper, or as much of it as the card has memory for."""
    how, card = _forward_settings(x, statistics=statistics), card_of(x.q.device)
    if card.measured:
        return how
    if not card.copies:
        how = replace(how, described=False)
    row, checked = _row(x), how.careful or how.splits > 1
    if card.tensor_memory and row.value > CHECKED and (checked or x.mask is not None):
        # Products of so few rows are kept in registers.
        how = replace(how, rows=min(how.rows, 32), warps=4)
    return fitting(how, card, partial(of_forward, row=row, card=card, checked=checked))


def _row(x: AttentionInputs) -> Row:
    """What tiles hold of a call."""
    size, pair = x.q.element_size(), 0
    if isinstance(x.bias, Dense):
        pair = x.bias.tensor.element_size()
    elif isinstance(x.bias, Relative):
        pair = x.bias.table.element_size()
    if not is_compact(x.mask, x.shape, x.q.device):
        pair += 1
    key, value = (size * wide(t.shape[-1]) for t in (x.q, x.v))
    return Row(key, value, pair, x.q.dtype == torch.float32)


def _forward_settings(x: AttentionInputs, *, statistics: bool) -> Forward:
    """Few queries are packed and split over the card; many get large tiles."""
    width = _width(x)
    narrow = x.q.dtype != torch.float32
    packed = x.group > 1 and is_simple(x.mask)
    rows = x.shape.Q * (x.group if packed else 1)
    # Many heads that share a key head, as 71 in Falcon, fill a large tile or several.
    if rows <= 64 or (packed and x.shape.Q <= FEW):
        if _heads_fill_hopper(x):
            tiles = x.shape.B * x.k.shape[1] * tiles_of(rows, 128)
            keys = 128 if width <= 128 else 64
            # Four tiles of keys at least for a program, and no program without.
            splits = max(min(processors(x.q.device) // tiles, x.shape.K // (4 * keys), 64), 2)
            splits = tiles_of(x.shape.K, tiles_of(tiles_of(x.shape.K, keys), splits) * keys)
            stages = 2 if x.v.shape[-1] > 128 else 3
            return Forward(128, keys, stages=stages, packed=True, splits=splits, hopper=True)
        tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
        if rows > 64 and narrow and width <= 128:
            tile = 128
        keys = 64 if narrow and width <= 128 else 32
        # A whole tile of rows is work enough: one program to a multiprocessor, and few sums to
        # merge. (Heads of 64 are quicker with smaller tiles and more programs.)
        alone = tile == 128 and width == 128
        if alone:
            keys = 128
        programs = x.shape.B * (x.k.shape[1] * tiles_of(rows, tile) if packed else x.shape.H)
        most = x.shape.K // (4 * keys)
        splits = _splits(programs, most, x.q.device, each=1 if alone else 4)
        careful = splits == 1 and not sees_all(x.mask, x.shape)
        # Three stages of wide float32, and checks, are more than a multiprocessor has.
        heavy = not narrow and width > 128 and tile == 64 and (careful or splits > 1)
        stages = 2 if heavy or alone else 3
        warps = 8 if tile == 128 else 4
        return Forward(
            tile, keys, warps=warps, stages=stages, packed=packed, splits=splits, careful=careful
        )
    if not narrow:
        rows, keys = (128, 64) if width <= 128 else (64, 32)
        return Forward(rows, keys, warps=8, stages=1, precision=_precision(width))
    if width <= 128 and _multiplications(x) < SMALL:
        return Forward(64, 64, warps=4, stages=2, careful=not sees_all(x.mask, x.shape))
    # Without a mask PyTorch serves as well; who names these kernels gets them.
    if (
        not statistics
        and x.mask is not None
        and _multiplications(x) >= WORK
        and cudnn.runs_forward(x)
    ):
        if not outruns_cudnn(x):
            return BY_CUDNN
    # Of narrower heads, what is measured: windows and short sequences could do with smaller tiles.
    tokens = min(x.shape.Q, x.shape.K)
    measured = tokens >= 512 if x.mask is None else tokens >= 1000 and cudnn.is_plainly_causal(x)
    if fits_hopper(x) and (width >= 128 or measured):
        if width <= 64:
            return Forward(128, 128, stages=3, hopper=True, queued=True)
        if width <= 128:
            # Another place for queries takes the memory of a stage.
            queued = x.shape.Q <= SHORT
            return Forward(128, 128, stages=2 if queued else 3, hopper=True, queued=queued)
        # Two stages of keys and values, and the queries, fill what memory a multiprocessor has.
        return Forward(128, 64, stages=3 if x.v.shape[-1] <= 128 else 2, hopper=True)
    if width <= 64:
        if fits_hopper(x) and x.softcap is None and x.bias is None and not x.dropout:
            # Three programs share a multiprocessor, and one's products run under another's powers.
            return Forward(64, 128, warps=4, stages=2, described=True, registers=168)
        if x.mask is None:
            return Forward(64, 128, warps=4, stages=2, described=True)
        return Forward(128, 64, warps=4, stages=3, described=True)
    if width <= 128:
        # A table of distances is read pair by pair, like a dense bias.
        if _laden(x) or isinstance(x.bias, Relative):
            return Forward(128, 64, warps=8, stages=2, described=True)
        return Forward(128, 128, warps=8, stages=3, described=True)
    if _laden(x):
        return Forward(64, 64, warps=8, stages=1)
    return Forward(128, 64, warps=8, stages=2, described=True)


def _heads_fill_hopper(x: AttentionInputs) -> bool:
    """Whether a call is one query a head, of so many heads on one key head that they are a tile of
    rows for Hopper."""
    return (
        x.group > 64
        and x.shape.Q == 1
        and x.shape.K >= 1024
        and x.bias is None
        and not x.dropout
        and sees_all(x.mask, x.shape)
        and fits_hopper(x)
        and describable(heads_as_rows(x))
    )


def _multiplications(x: AttentionInputs) -> int:
    """Of queries with keys."""
    B, H, Q, K = x.shape
    return B * H * Q * K * x.q.shape[-1]


def _laden(x: AttentionInputs) -> bool:
    """Whether more than keys and values is loaded for each tile, which takes shared memory."""
    return isinstance(x.bias, Dense) or not is_compact(x.mask, x.shape, x.q.device)


def _precision(width: int) -> Precision:
    """Of float32 products. Three of TF32 parts are nearly as accurate as one of float32, and far
    quicker where heads are wide."""
    return "ieee" if width <= 32 else "tf32x3"


def _splits(programs: int, most: int, device: torch.device, *, each: int) -> int:
    """A power of two that gives every multiprocessor so many programs, each with enough keys."""
    wanted = min(each * processors(device) // max(programs, 1), most, 64)
    return 1 << max(wanted, 1).bit_length() - 1


def processors(device: torch.device) -> int:
    return card_of(device).processors


@dataclass(frozen=True)
class Tile(Tiled):
    """How one backward kernel runs."""


@dataclass(frozen=True)
class Backward:
    """How the backward kernels run: the one that owns keys, and the one that owns queries."""

    keys: Tile
    queries: Tile
    precision: Precision = "ieee"


@dataclass(frozen=True)
class AtOnce(Tiled):
    """How the one kernel of all gradients runs."""

    described: bool = True
    """Whether TMA reads queries and adds to the sums of their gradients."""
    registers: int | None = None
    hopper: bool = False
    """Whether the kernel for Hopper runs; the rest is then for where it is mended."""


def at_once(x: AttentionInputs) -> AtOnce | None:
    """How one kernel computes all gradients, where that is quicker: its sums have no fixed order,
    and its atomics are quick on Hopper."""
    if generation(x.q.device) != 9 or torch.are_deterministic_algorithms_enabled():
        return None
    width = _width(x)
    if x.q.dtype == torch.float32 or width > 128:
        return None
    if width <= 64:
        return AtOnce(64, 64, warps=4, stages=2)
    if x.softcap is not None:
        # There are no registers left for a third sum: it pays since logits cost much.
        return AtOnce(64, 64, warps=4, stages=1)
    if fits_hopper(x) and all(wide(t.shape[-1]) == 128 for t in (x.q, x.v)):
        return AtOnce(64, 128, warps=8, stages=1, hopper=True)
    return None


def backward_settings(x: AttentionInputs) -> Backward:
    how, card = _backward_settings(x), card_of(x.q.device)
    if card.measured:
        return how
    row = _row(x)
    return Backward(
        fitting(how.keys, card, partial(of_key_gradients, row=row, card=card)),
        fitting(how.queries, card, partial(of_query_gradients, row=row, card=card)),
        how.precision,
    )


def _backward_settings(x: AttentionInputs) -> Backward:
    width = _width(x)
    if x.q.dtype == torch.float32:
        if width <= 64:
            return Backward(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), _precision(width))
        side = 32 if width <= 128 else 16
        return Backward(Tile(side, side, 4, 1), Tile(side, side, 4, 1), _precision(width))
    if width <= 64:
        return Backward(Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))
    if width <= 128:
        return Backward(Tile(64, 128, 8, 1), Tile(128, 64, 8, 1 if _laden(x) else 3))
    return Backward(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1))


def mending_settings(x: AttentionInputs) -> Tile:
    """How gradients of queries that cuDNN found are mended: by tiles that compile quickly."""
    side = 64 if _width(x) <= 128 else 32
    return Tile(side, side, 4, 1)


@dataclass(frozen=True)
class Looking(Tiled):
    """How the kernels of the second pass run."""

    stages: int = 3
    precision: Precision = "ieee"
    hopper: bool = False
    """Whether what keys received is summed by the kernel for Hopper, where that fits."""


def looking_settings(x: AttentionInputs) -> Looking:
    how, card = _looking_settings(x), card_of(x.q.device)
    if card.measured:
        return how
    return fitting(how, card, partial(of_second_pass, row=_row(x), card=card))


def _looking_settings(x: AttentionInputs) -> Looking:
    width = wide(x.q.shape[-1])
    if x.q.dtype == torch.float32:
        side = 64 if width <= 128 else 32
        return Looking(side, side, warps=4, stages=1, precision=_precision(width))
    if width > 128:
        return Looking(64, 64)
    return Looking(128, 64, warps=4, hopper=width == 128 or x.mask is not None)
