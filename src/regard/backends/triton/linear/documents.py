"""Where sums start anew: the number of each token's document along its sequence, in kernels.

A state belongs to one document, that of the token beside it: the one before a tile as tokens go by,
the one behind it as they go backwards. Only tokens of that document read it, and it is dropped by a
tile that ends in another. Without documents (`runs` is None) everything is one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_at(runs, b, count, place):
    """The document at a place, or at several; before the first it is 0, that of the state which
    the sequence begins with."""
    at = runs + b.to(tl.int64) * count + place
    return tl.load(at, mask=(place >= 0) & (place < count), other=0)


@triton.jit
def run_before(runs, b, count, start):
    return run_at(runs, b, count, start - 1)


@triton.jit
def run_at_end(runs, b, count, stop):
    """The document of the last token before `stop`."""
    return run_at(runs, b, count, tl.minimum(stop, count) - 1)


@triton.jit
def run_behind(runs, b, count, stop):
    """The document that goes on at `stop`; at the end, that of the last token."""
    return run_at(runs, b, count, tl.minimum(stop, count - 1))


@triton.jit
def rows_of(x, runs, b, count, row, run):
    """Rows of a tile that belong to a document; 0 in place of others, whatever they hold."""
    if runs is not None:
        x = tl.where((run_at(runs, b, count, row) == run)[:, None], x, 0.0)
    return x


@triton.jit
def numbers_of(x, runs, b, count, row, run):
    """The same of one number a row."""
    if runs is not None:
        x = tl.where(run_at(runs, b, count, row) == run, x, 0.0)
    return x


@triton.jit
def pairs_of(x, runs, b, count, row):
    """Pairs of a square tile whose two tokens are of one document."""
    if runs is not None:
        run = run_at(runs, b, count, row)
        x = tl.where(run[:, None] == run[None, :], x, 0.0)
    return x
