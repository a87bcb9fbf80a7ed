"""Which tile of queries a program takes, and which tiles of keys it visits."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.backends.triton.hopper.pairs import edges_on_hopper, limit_on_hopper
from regard.backends.triton.rules import SPANS, span_of_keys

_span_of_keys = gluon.jit(span_of_keys.fn)


@gluon.jit
def place_of(item, n, splits, BM: gl.constexpr):
    """Which tile of queries, of which sequence and head, and which split of the keys. Under a band
    later tiles have more keys: they start first."""
    tiles = (n.queries + BM - 1) // BM
    split = 0
    if splits is not None:
        split = item % splits
        item = item // splits
    program = item // tiles
    return tiles - 1 - item % tiles, program // n.heads, program % n.heads, split


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring of buffers, and the phase of its barriers: it flips at each wrap."""
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def keys_of_split(n, split, splits, BN: gl.constexpr):
    """Where the keys of a split start and stop."""
    size = ((n.keys + BN - 1) // BN + splits - 1) // splits * BN
    return split * size, gl.minimum((split + 1) * size, n.keys)


@gluon.jit
def keys_of_row_tile(rule, n, b, h, tile, split, splits, BM: gl.constexpr, BN: gl.constexpr):
    """The key tiles of a row tile, from the last to the first: the first key of the last one, and
    how many tiles come before the full ones, with them, and in all."""
    limit = limit_on_hopper(rule, n, b)
    first = tile * BM
    last = gl.minimum(first + BM, n.queries) - 1
    if splits is not None:
        start, stop = keys_of_split(n, split, splits, BN)
        full_start, full_stop = start, start + (stop - start) // BN * BN
    elif rule.kind == SPANS:
        start, full_start, full_stop, stop = edges_on_hopper(rule, b, h, first, n.queries)
    else:
        start, full_start, full_stop, stop = _span_of_keys(rule, first, last, limit, BN)
    right = (stop - full_stop + BN - 1) // BN
    full = right + (full_stop - full_start) // BN
    every = gl.maximum(full + (full_start - start) // BN, 1)
    return limit, start + (every - 1) * BN, right, full, every
