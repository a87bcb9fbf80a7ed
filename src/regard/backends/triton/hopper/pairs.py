"""What the kernels do with a tile of pairs: have it copied, hide what a row does not see."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from regard.backends.triton.arguments import wide
from regard.backends.triton.assembly import (
    SEEN_32,
    SEEN_32_FORM,
    SEEN_64,
    SEEN_64_FORM,
    UNLESS_DROPPED,
)
from regard.backends.triton.pairs import ALIBI, LOG2E, mixed_word
from regard.backends.triton.rules import SPANS, band_at, edges_of, limit_of, span_of_rows

# Renamed after Triton 3.6.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
send = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
limit_on_hopper = gluon.jit(limit_of.fn)
_band_at = gluon.jit(band_at.fn)
edges_on_hopper = gluon.jit(edges_of.fn)
_span_of_rows = gluon.jit(span_of_rows.fn)
_mixed_word = gluon.jit(mixed_word.fn)
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def width_on_hopper(t: Tensor) -> int:
    """The width of a tile of vectors: 64, 128 or 256 numbers. The copy engine fills in zeros."""
    return max(64, wide(t.shape[-1]))


def described(t: Tensor, rows: int, *, seen_as: Tensor | None = None) -> Any:
    """A tensor, or a view of it, as the copy engine reads it: in tiles of so many rows."""
    view = t if seen_as is None else seen_as
    tile = [1, 1, rows, width_on_hopper(t)]
    return TensorDescriptor(t, list(view.shape), list(view.stride()), tile, _LAYOUT)


@gluon.jit
def span_of_row(rule, b, h, row, limit):
    """The first key that each query may see, and how many. The kernels know bands, and runs of
    keys, whose memory goes on beyond the last query."""
    if rule.kind == SPANS:
        at = (b * rule.next_batch + h * rule.next_head) * rule.lists.rows + row
        return gl.load(rule.lists.first + at), gl.load(rule.lists.many + at)
    else:
        return _band_at(rule, row, limit)


@gluon.jit
def only_allowed(HOW: gl.constexpr, x, key, first, many, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Logits or weights of the keys from `key` on, minus infinity or 0 where a row does not see
    them: HOW says which."""
    column = gl.expand_dims(key + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT)), 0)
    place = column - gl.expand_dims(first, 1)
    return gl.inline_asm_elementwise(
        HOW, "=f,f,r,r", [x, place, gl.expand_dims(many, 1)], gl.float32, True, 1
    )


@gluon.jit
def seen_logits(s, key, first, many, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Logits of the keys from `key` on, of a group's rows: minus infinity where a row does not see
    them."""
    column = gl.expand_dims(key + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT)), 0)
    place, _ = gl.broadcast(column - gl.expand_dims(first, 1), s)
    count, _ = gl.broadcast(gl.expand_dims(many, 1), s)
    if BN == 64:
        return gl.inline_asm_elementwise(
            SEEN_32, SEEN_32_FORM, [s, place, count], gl.float32, True, 32
        )
    else:
        return gl.inline_asm_elementwise(
            SEEN_64, SEEN_64_FORM, [s, place, count], gl.float32, True, 64
        )


@gluon.jit
def queries_of_key_tile(rule, n, b, h, tile, BM: gl.constexpr, BN: gl.constexpr):
    """The tiles of queries that see a key tile: the first query, and how many tiles come before
    the full ones, with them, and in all."""
    limit = limit_on_hopper(rule, n, b)
    first = tile * BN
    last = gl.minimum(first + BN, n.keys) - 1
    if rule.kind == SPANS:
        start, full_start, full_stop, stop = edges_on_hopper(rule, b, h, first, n.keys)
    else:
        start, full_start, full_stop, stop = _span_of_rows(rule, first, last, limit, n.queries, BM)
    left = (full_start - start) // BM
    full = left + (full_stop - full_start) // BM
    return limit, start, left, full, full + (stop - full_stop + BM - 1) // BM


@gluon.jit
def slope_of(bias, h):
    """Of a head under ALiBi, times log₂ e."""
    slope = 0.0
    if bias.kind == ALIBI:
        slope = gl.load(bias.ptr + h).to(gl.float32) * LOG2E
    return slope


@gluon.jit
def words_of(drop, b, h, row):
    """A number for each query, of which `keeps` makes what dropout keeps."""
    word = _mixed_word(drop.seed.to(gl.uint32) + b.to(gl.uint32))
    return _mixed_word(_mixed_word(word + h.to(gl.uint32)) + row.to(gl.uint32))


@gluon.jit
def keeps(drop, words, key):
    """Which weights dropout keeps, as `pairs.kept`; words and keys along different axes."""
    return _mixed_word(words + key.to(gl.uint32)) >= drop.threshold.to(gl.uint32)


@gluon.jit
def dropped(p, drop, words, key, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of the keys from `key` on after dropout. What is kept grows in the end."""
    if drop.on:
        column = gl.expand_dims(key + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT)), 0)
        given = [p, gl.expand_dims(words, 1), column, drop.threshold.to(gl.uint32)]
        p = gl.inline_asm_elementwise(UNLESS_DROPPED, "=f,f,r,r,r", given, gl.float32, True, 1)
    return p
