"""Plain calls, compiled as a whole, forward and backward.

What `forward` and `backward` do with products and loops for every cut, the C functions do within
one core: each thread takes a row tile of one head after the other, and its tile of logits never
leaves the core's cache. Under a band (causal, windows) or no mask they find the keys of a row tile
themselves; for other masks Python writes tables of them, some row tiles at a time.

Both passes cut a call into the same tiles, so that large logits round alike in both.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from array import array
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.tiled.compiled import TYPES, Attend, Loop, Pull
from regard.backends.tiled.inner_loop import loop_for
from regard.backends.tiled.walk import Cut, Slab, TileSize, slabs, spans
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.scores.comparison import Dot
from regard.stopping import step

SLAB = 1 << 22
"""Numbers of q, or of k, in a slab, unless that leaves too few heads for all threads."""
HELD = 1 << 22
"""Bytes of masks after which a lot of row tiles ends, if it keeps all threads busy."""
LOT = 1 << 33
"""Multiplications per thread after which a lot ends, so that Ctrl-C is heard within a second."""
ALONE = 1 << 18
"""Multiplications that are not worth waking a second thread for."""
PACKED_ROWS = 32
"""Rows that look at the same keys, from which on packing these pays."""
PACKED_KEYS = 64
"""Keys are packed in runs of a multiple of this (KEYS in packed.h)."""
HANDS = 8
"""Copies of the gradients of keys and values at most, one for each thread that adds to them."""


class Passed(NamedTuple):
    """What the forward pass leaves behind: rows, and what rounding took from lse."""

    rows: Rows
    lse_rest: Float[Tensor, "b h q"]


class Gradients(NamedTuple):
    """Gradients of q, k and v, in the precision that scores are computed in."""

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]


def fusing(x: AttentionInputs) -> Loop | None:
    """The compiled loop, if it can run this call as a whole."""
    plain = isinstance(x.comparison, Dot) and x.softcap is None and x.bias is None
    if not plain or x.dropout:
        return None
    if not (x.q.numel() and x.k.numel() and x.v.numel()):
        return None
    # The weight of a single key is exactly 1, when looked into too: PyTorch makes such products by
    # other means, which round differently.
    if x.k.shape[2] == 1:
        return None
    loop = loop_for(x.q.device, x.compute_dtype)
    return loop if loop is not None and loop.multiply else None


def outruns_pytorch(x: AttentionInputs) -> bool:
    """Whether this is known to be quicker than PyTorch's own kernel: in half precision on a CPU
    that has no instructions for it (4 to 150 times on a Neoverse-N1), and for long float32 calls
    under a causal mask without gradients, of which its kernel computes more hidden pairs. Not under
    the compiler, which must not look for a C compiler."""
    if torch.compiler.is_compiling() or x.q.device.type != "cpu":
        return False
    if x.q.dtype in (torch.bfloat16, torch.float16):
        return not _multiplies(x.q.dtype) and fusing(x) is not None
    if x.mask is None or x.mask.band() is None or x.q.dtype != torch.float32:
        return False
    return min(x.shape.Q, x.shape.K) >= 1024 and not x.needs_grad and fusing(x) is not None


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch has quick products of such matrices on this CPU. It says so itself, but for
    float16 on ARM, where that speaks of other layers than attention."""
    if dtype == torch.float16:
        arm = platform.machine() == "aarch64"
        return not arm and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fused_size(x: AttentionInputs) -> TileSize:
    """Tiles of logits that fit the cache of one core, and heads enough for all of them."""
    Q, K, D = x.q.shape[2], x.k.shape[2], x.q.shape[3]
    # Half precision is copied to float32 slab by slab, so a slab is not everything at once.
    heads = SLAB // (max(Q * x.group, K) * D)
    return TileSize(max(4 * torch.get_num_threads(), heads), 256 if Q >= 4096 else 128, 512)


class _Product(Enum):
    """What multiplies matrices: of float32, of bfloat16, or of narrow ones that were packed."""

    FLOATS = auto()
    HALVES = auto()
    PACKED = auto()


def _product(x: AttentionInputs, loop: Loop) -> _Product:
    dtype = x.q.dtype
    if dtype != x.k.dtype or dtype != x.v.dtype:
        return _Product.FLOATS
    # Without oneDNN, which can be switched off, PyTorch has no such product.
    can_pack = dtype in loop.multiply_packed and torch._C._get_mkldnn_enabled()
    if can_pack and min(x.shape.Q * x.group, x.shape.K) >= PACKED_ROWS:
        return _Product.PACKED
    if dtype == torch.bfloat16 and loop.multiply_halves is not None:
        return _Product.HALVES
    return _Product.FLOATS


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
    product: _Product

    @classmethod
    def of(cls, x: AttentionInputs, loop: Loop) -> Plan:
        """Tiles, and threads for what is worth them."""
        B, H, Q, D = x.q.shape
        _, G, K, E = x.v.shape
        threads = 1 if B * H * Q * K * D < ALONE else torch.get_num_threads()
        size, band, product = fused_size(x), _band(x.mask, Q, K), _product(x, loop)
        keys = min(size.keys, K)
        if product is _Product.PACKED:
            keys = -(-keys // PACKED_KEYS) * PACKED_KEYS
            rows = min(size.rows, 64) if Q < 512 else size.rows
            while rows > 32 and 4 * threads * rows > B * H * Q:
                rows //= 2
            size = replace(size, rows=rows)
        return cls(B, H, Q, K, G, D, E, band, size, size.rows, keys, threads, product)

    @property
    def group(self) -> int:
        return self.H // self.G

    @property
    def narrow(self) -> bool:
        """Whether matrices are multiplied as they were given, and what comes out is as narrow."""
        return self.product is not _Product.FLOATS

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and keys that a tile has room for (see products.h)."""
        if self.product is not _Product.PACKED:
            return self.rows, self.keys
        return -(-self.rows // 16) * 16, self.keys + PACKED_KEYS

    @property
    def scratch(self) -> int:
        """Numbers held for all threads: a tile of logits, one of queries, three sums of rows, and
        what is mixed if that becomes narrow."""
        rows, keys = self.tile
        return self.threads * rows * (keys + self.D + 3 + (self.E if self.narrow else 0))

    @property
    def packed(self) -> tuple[int, int]:
        """Numbers of a packed head: of keys and of values."""
        keys = -(-self.K // self.keys) * self.keys
        return keys * (self.D + self.D % 2), keys * self.E

    @property
    def held(self) -> int:
        """All memory that the forward pass takes, in float32 numbers."""
        packed = self.B * self.G * sum(self.packed) if self.product is _Product.PACKED else 0
        return self.scratch + packed // 2

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


def attend(x: AttentionInputs, loop: Loop, *, statistics: bool) -> Passed | None:
    """The forward pass. None: a hidden value that is not finite may have done harm."""
    plan = Plan.of(x, loop)
    B, H, Q = plan[:3]
    scratch = x.v.new_empty(plan.scratch, dtype=torch.float32)
    out = x.v.new_empty(B, H, Q, plan.E, dtype=x.v.dtype if plan.narrow else torch.float32)
    lse, rest = scratch.new_empty(B, H, Q), scratch.new_empty(B, H, Q)
    many = (B, H, Q) if statistics else (0,)
    largest, entropy = scratch.new_empty(many), scratch.new_empty(many)
    sink = None if x.sink is None else x.sink.to(torch.float32).contiguous()
    for piece in _pieces(x, plan, wide=not plan.narrow):
        packed = _Packed.of(piece, plan, values=True)
        call = Attend(
            **{"out_halves" if plan.narrow else "out": piece.address(out)},
            lse=piece.address(lse),
            rest=piece.address(rest),
            largest=piece.address(largest) if statistics else None,
            entropy=piece.address(entropy) if statistics else None,
            sink=None if sink is None else sink[piece.heads].data_ptr(),
            **_described(x, loop, piece, plan, scratch, packed),
        )
        for lot in _lots(piece, plan):
            step()
            lot.put(call)
            if not loop.attend(call, plan.threads):
                return None
    return Passed(Rows(out.to(x.v.dtype), lse, largest, entropy), rest)


def pull(
    x: AttentionInputs,
    loop: Loop,
    passed: Passed,
    g_out: Float[Tensor, "b h q e"],
    shift: Float[Tensor, "b h q"],
    g_entropy: Float[Tensor, "b h q"] | None,
) -> Gradients:
    """The backward pass. `shift` is what every weight of a row is shifted by."""
    plan = Plan.of(x, loop)
    B, H, Q, K, G, D, E = plan[:7]
    few = 4 * plan.threads > B * G
    hands = min(plan.threads, HANDS, -(-Q // plan.rows)) if few else 1
    dq = x.q.new_empty(B, H, Q, D, dtype=torch.float32)
    dk, dv = dq.new_zeros(hands, B, G, K, D), dq.new_zeros(hands, B, G, K, E)
    lse, heat = passed.rows.lse.contiguous(), g_entropy
    expected = None
    if heat is not None:
        heat, expected = heat.contiguous(), (lse - passed.rows.entropy).contiguous()
    rest, shift = passed.lse_rest.contiguous(), shift.contiguous()
    rows, keys_room = plan.tile
    scratch = dq.new_empty(plan.threads * rows * (2 * keys_room + 2 * D + E))
    for piece in _pieces(x, plan):
        packed = _Packed.of(piece, plan, values=False)
        g = _in_rows(g_out[piece.batch, piece.heads])
        keys = (0, piece.batch, piece.key_heads)
        call = Pull(
            g=g.data_ptr(),
            g_steps=_steps(g),
            lse=piece.address(lse),
            rest=piece.address(rest),
            shift=piece.address(shift),
            heat=None if heat is None else piece.address(heat),
            expected=None if expected is None else piece.address(expected),
            dq=piece.address(dq),
            dk=dk[keys].data_ptr(),
            dv=dv[keys].data_ptr(),
            dk_step=B * G * K * D,
            dv_step=B * G * K * E,
            key_heads=G,
            hands=hands,
            **_described(x, loop, piece, plan, scratch, packed),
        )
        for lot in _lots(piece, plan):
            step()
            lot.put(call)
            loop.pull(call, plan.threads)
    return Gradients(dq, *(t[0] if hands == 1 else t.sum(0) for t in (dk, dv)))


_EVERYTHING = slice(None)


class _Piece(NamedTuple):
    """Some batch entries and heads, in float32 or as they were given; with the slab that knows
    their mask, if it is no band."""

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]
    batch: slice
    heads: slice
    key_heads: slice
    slab: Slab | None
    halves: tuple[Tensor, Tensor, Tensor] | None
    """q, k and v as they were given, if such matrices are multiplied."""

    def address(self, t: Float[Tensor, "b h q *rest"]) -> int:
        """Where this piece begins in a contiguous tensor of rows."""
        batch, head = self.batch.start or 0, self.heads.start or 0
        return t.data_ptr() + (batch * t.stride(0) + head * t.stride(1)) * t.element_size()


class _Packed(NamedTuple):
    """Memory for the packed keys of a piece, and for its values."""

    keys: Tensor
    values: Tensor | None

    @classmethod
    def of(cls, piece: _Piece, plan: Plan, *, values: bool) -> _Packed | None:
        if plan.product is not _Product.PACKED:
            return None
        assert piece.halves is not None
        _, k, v = piece.halves
        heads = k.shape[0] * k.shape[1]
        a, b = plan.packed
        return cls(k.new_empty(heads * a), v.new_empty(heads * b) if values else None)


def _pieces(x: AttentionInputs, plan: Plan, *, wide: bool = True) -> Iterator[_Piece]:
    """Without `wide` nothing is made float32."""
    if plan.band is None:
        for slab in slabs(x, plan.size, is_finite=True):
            given = _all_in_rows(slab.x.q, slab.x.k, slab.x.v) if plan.narrow else None
            parts = _all_in_rows(slab.q.flatten(1, 2), slab.k, slab.v) if wide else given
            assert parts is not None
            yield _Piece(*parts, slab.batch, slab.heads, slab.key_heads, slab, given)
        return
    if x.q.dtype == torch.float32 or not wide:
        parts = _all_in_rows(x.q, x.k, x.v)
        everything = (_EVERYTHING, _EVERYTHING, _EVERYTHING)
        yield _Piece(*parts, *everything, None, parts if plan.narrow else None)
        return
    for batch, key_heads in spans(x, plan.size):
        heads = slice(key_heads.start * plan.group, key_heads.stop * plan.group)
        part = (x.q[batch, heads], x.k[batch, key_heads], x.v[batch, key_heads])
        given = _all_in_rows(*part) if plan.narrow else None
        parts = _all_in_rows(*(t.to(torch.float32) for t in part))
        yield _Piece(*parts, batch, heads, key_heads, None, given)


def _all_in_rows(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = map(_in_rows, tensors)
    return q, k, v


def _described(
    x: AttentionInputs,
    loop: Loop,
    piece: _Piece,
    plan: Plan,
    scratch: Tensor,
    packed: _Packed | None,
) -> dict[str, Any]:
    """The fields of a call that both passes share, but for its lot of row tiles."""
    assert isinstance(x.comparison, Dot)
    q, k, v = piece.q, piece.k, piece.v
    low, high = plan.band or (0, 0)
    group = plan.group
    fields: dict[str, Any] = {"multiply": loop.multiply}
    if packed is not None:
        fields |= {"multiply_packed": loop.multiply_packed[x.q.dtype], "release": loop.release}
        fields |= {"k_packed": packed.keys.data_ptr(), "unpacked": True}
        if packed.values is not None:
            fields |= {"v_packed": packed.values.data_ptr()}
    elif piece.halves is not None:
        fields |= {"multiply_halves": loop.multiply_halves}
    if piece.halves is not None:
        fields |= {"type": TYPES[x.q.dtype]}
        for name, t in zip("qkv", piece.halves, strict=True):
            fields |= {f"{name}_halves": t.data_ptr(), f"{name}_half_steps": _steps(t)}
    if q.dtype == torch.float32:
        for name, t in zip("qkv", (q, k, v), strict=True):
            fields |= {name: t.data_ptr(), f"{name}_steps": _steps(t)}
    return fields | {
        "rows_step": plan.H * plan.Q,
        "B": k.shape[0],
        "G": k.shape[1],
        "R": group,
        "Q": plan.Q,
        "K": plan.K,
        "D": plan.D,
        "E": plan.E,
        # Few queries of heads that share keys make one product together.
        "stacked": group > 1 and group * plan.Q <= plan.rows,
        "low": low,
        "high": high,
        "rows": plan.rows,
        "keys": plan.keys,
        "scratch": scratch.data_ptr(),
        "scratch_step": len(scratch) // plan.threads,
        "scale": x.comparison.scale,
    }


class _Lot(NamedTuple):
    """Row tiles to work through in one go; for masks that are no band with tables of their cuts."""

    first: int
    last: int
    tables: tuple[array[int], array[int], array[int]] | None = None
    held: tuple[object, ...] = ()
    """What the tables point to."""

    def put(self, call: Attend | Pull) -> None:
        call.first_tile, call.last_tile = self.first, self.last
        if self.tables is not None:
            call.tiles, call.cuts, call.parts = (t.buffer_info()[0] for t in self.tables)


def _lots(piece: _Piece, plan: Plan) -> Iterator[_Lot]:
    heads = piece.q.shape[0] * piece.q.shape[1]
    width = plan.D + plan.E
    if piece.slab is None:
        tiles = -(-plan.Q // plan.rows)
        work = heads * min(plan.rows, plan.Q) * plan.K * width
        step = max(1, LOT * plan.threads // work)
        for first in range(0, tiles, step):
            yield _Lot(first, min(first + step, tiles))
        return
    lot: list[tuple[slice, list[Cut]]] = []
    first = held = work = 0
    for rows, cuts in piece.slab.rows():
        lot.append((rows, cuts))
        held += sum(hidden.numel() for cut in cuts for _, hidden in cut.partial)
        work += heads * plan.rows * width * sum(cut.keys.stop - cut.keys.start for cut in cuts)
        busy = len(lot) * heads >= 4 * plan.threads
        if (held > HELD and busy) or work > LOT * plan.threads:
            yield _tabled(first, lot, piece.slab)
            first, lot, held, work = first + len(lot), [], 0, 0
    if lot:
        yield _tabled(first, lot, piece.slab)


def _tabled(first: int, lot: list[tuple[slice, list[Cut]]], slab: Slab) -> _Lot:
    tiles, cuts, parts = array("l"), array("l"), array("l")
    axes = (*slab.x.k.shape[:2], slab.x.group)
    for rows, looked_at in lot:
        before = len(cuts) // 4
        for cut in looked_at:
            part = len(parts) // 7
            for keys, hidden in cut.partial:
                *strides, _ = hidden.expand(*axes, -1, -1).stride()
                parts.extend((keys.start, keys.stop, hidden.data_ptr(), *strides))
            cuts.extend((cut.keys.start, cut.keys.stop, part, len(parts) // 7))
        tiles.extend((rows.start, rows.stop, before, len(cuts) // 4))
    return _Lot(first, first + len(lot), (tiles, cuts, parts), (lot,))


def _band(mask: Mask | None, Q: int, K: int) -> tuple[int, int] | None:
    if mask is None:
        return -Q, K
    band = mask.band()
    if band is None:
        return None
    low, high = band
    return int(min(max(low, -Q), K)), int(max(min(high, K), -Q - 1))


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
