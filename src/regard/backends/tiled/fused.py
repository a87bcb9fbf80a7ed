"""The forward pass of plain calls, compiled as a whole.

What `forward` does with a product, a loop and a product for every cut, tile.c does within one core:
each thread takes a row tile of one head after the other, and its tile of logits never leaves the
core's cache. Python only says which keys each row tile looks at, some row tiles (a wave) at a time.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.tiled.compiled import Loop, Wave
from regard.backends.tiled.inner_loop import loop_for
from regard.backends.tiled.walk import Cut, Slab, TileSize, slabs
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot

SMALL = 1 << 10
"""Multiplications below which a product of two matrices is small; PyTorch's bound is 400."""
SLAB = 1 << 22
"""Numbers of q, or of k, in a slab, unless that leaves too few heads for all threads."""
HELD = 1 << 22
"""Bytes of masks after which a wave ends, if it keeps all threads busy."""


class Sums(NamedTuple):
    """The running sums of every row: o, m, l and e."""

    mixed: Float[Tensor, "b h q e"]
    largest: Float[Tensor, "b h q"]
    total: Float[Tensor, "b h q"]
    energy: Float[Tensor, "b h q"]


def fusing(x: AttentionInputs) -> Loop | None:
    """The compiled loop, if it can run this call as a whole."""
    plain = isinstance(x.comparison, Dot) and x.softcap is None and x.bias is None
    if not plain or x.dropout:
        return None
    # Small products PyTorch makes by other means, which round differently; then large logits would
    # not be the same when a trace is looked into or differentiated.
    Q, K, D = x.shape.Q, x.shape.K, x.q.shape[-1]
    if min(Q, K) < 2 or Q * K * D < SMALL or not x.v.shape[-1]:
        return None
    # Few queries of heads that share keys make one product together, which the walk knows.
    if x.group > 1 and Q < 32:
        return None
    loop = loop_for(x.q.device, x.compute_dtype)
    return loop if loop is not None and loop.multiply else None


def outruns_pytorch(x: AttentionInputs) -> bool:
    """Whether this is known to be quicker than PyTorch's own kernel: for long float32 calls under a
    causal mask, of which its kernel computes more hidden pairs. Not with gradients, nor under the
    compiler, which must not look for a C compiler."""
    if torch.compiler.is_compiling() or x.mask is None or x.mask.band() is None:
        return False
    if min(x.shape.Q, x.shape.K) < 1024 or x.q.dtype != torch.float32 or x.needs_grad:
        return False
    return fusing(x) is not None


def fused_size(x: AttentionInputs) -> TileSize:
    """Tiles of logits that fit the cache of one core, and heads enough for all of them."""
    # Half precision is copied to float32 slab by slab, so a slab is not everything at once.
    heads = SLAB // max(1, max(x.shape.Q * x.group, x.shape.K) * x.q.shape[-1])
    rows = 256 if x.shape.Q >= 4096 else 128
    return TileSize(max(4 * torch.get_num_threads(), heads), rows, 512)


def scratch_numbers(x: AttentionInputs, size: TileSize) -> int:
    """A tile of logits and one of queries for each thread."""
    tile = size.rows * (min(size.keys, x.shape.K) + x.q.shape[-1])
    return torch.get_num_threads() * tile


def fuse(x: AttentionInputs, loop: Loop, sums: Sums, *, statistics: bool) -> bool:
    """Fill the sums of all rows, with o divided by l. False: a hidden value that is not finite may
    have done harm, and none of it counts."""
    assert isinstance(x.comparison, Dot)
    size, threads = fused_size(x), torch.get_num_threads()
    scratch = sums.mixed.new_empty(scratch_numbers(x, size))
    for slab in slabs(x, size, is_finite=True):
        q, k, v = (_in_rows(t) for t in (slab.q.flatten(1, 2), slab.k, slab.v))
        mixed, largest, total, energy = (t[slab.batch, slab.heads] for t in sums)
        wave = Wave(
            multiply=loop.multiply,
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            q_steps=_steps(q),
            k_steps=_steps(k),
            v_steps=_steps(v),
            largest=largest.data_ptr(),
            total=total.data_ptr(),
            energy=energy.data_ptr() if statistics else None,
            means=mixed.data_ptr(),
            sums_step=x.shape.H * x.shape.Q,
            B=k.shape[0],
            G=k.shape[1],
            R=x.group,
            Q=x.shape.Q,
            D=k.shape[3],
            E=v.shape[3],
            scratch=scratch.data_ptr(),
            scratch_step=len(scratch) // threads,
            scale=x.comparison.scale,
        )
        for rows in _waves(slab, threads):
            if not _ride(loop, wave, slab, rows, threads):
                return False
    return True


Rows = list[tuple[slice, list[Cut]]]


def _waves(slab: Slab, threads: int) -> Iterator[Rows]:
    """Row tiles in lots: many, so that threads rarely wait, unless their masks are large."""
    heads = slab.x.shape.B * slab.x.shape.H
    lot: Rows = []
    held = 0
    for rows, cuts in slab.rows():
        lot.append((rows, cuts))
        held += sum(hidden.numel() for cut in cuts for _, hidden in cut.partial)
        if held > HELD and len(lot) * heads >= 4 * threads:
            yield lot
            lot, held = [], 0
    if lot:
        yield lot


def _ride(loop: Loop, wave: Wave, slab: Slab, lot: Rows, threads: int) -> bool:
    tiles, cuts, parts = array("l"), array("l"), array("l")
    axes = slab.q.shape[:3]
    for rows, looked_at in lot:
        first = len(cuts) // 4
        for cut in looked_at:
            before = len(parts) // 7
            for keys, hidden in cut.partial:
                *strides, _ = hidden.expand(*axes, -1, -1).stride()
                parts.extend((keys.start, keys.stop, hidden.data_ptr(), *strides))
            cuts.extend((cut.keys.start, cut.keys.stop, before, len(parts) // 7))
        tiles.extend((rows.start, rows.stop, first, len(cuts) // 4))
    wave.n_tiles = len(lot)
    wave.tiles, wave.cuts, wave.parts = (table.buffer_info()[0] for table in (tiles, cuts, parts))
    return loop.attend(wave, threads)


def _in_rows(t: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
    """Entries of a row lie side by side, and rows do not overlap, as matrix products want it."""
    n, d = t.shape[2:]
    side_by_side = d == 1 or t.stride(3) == 1
    apart = n == 1 or d <= t.stride(2) < 2**31
    return t if side_by_side and apart else t.clone(memory_format=torch.contiguous_format)


def _steps(t: Float[Tensor, "b h n d"]) -> ctypes.Array[ctypes.c_long]:
    # The stride of an axis of length 1 can be anything.
    row = t.stride(2) if t.shape[2] > 1 else t.shape[3]
    return (ctypes.c_long * 3)(t.stride(0), t.stride(1), row)
