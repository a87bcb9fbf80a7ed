"""Plain calls that come again: all that calls of a kind share is made ready once, and each of them
needs no more than memory of its own and the addresses of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.contract import Repeated, Rows, Tabled, empty_table, table_step
from regard.backends.tiled.fused import described, fusing
from regard.backends.tiled.loop import Attend, Loop, loop_for
from regard.backends.tiled.pieces import Packed, lots, pieces
from regard.backends.tiled.plan import Plan, Product
from regard.backends.tiled.walk import takes_all
from regard.inputs import AttentionInputs
from regard.stopping import step

_FLOAT = torch.float32.itemsize
_LINE = 64 // _FLOAT
"""Numbers in a line of the cache."""


def prepared(x: AttentionInputs, plainly: Repeated, *, statistics: bool) -> Repeated | None:
    """How calls of this one's kind run as a whole in C; None where each of them must be looked at.
    `plainly` runs those in which a masked value may have done harm."""
    loop = fusing(x)
    if loop is None or x.needs_grad or x.sink is not None:
        return None
    dtype = x.q.dtype
    plan = Plan.of(x, loop)
    if plan.band is None and not takes_all(x, plan.rows):
        # Tables of what a mask hides may be large.
        return None
    piece, *others = pieces(x, plan, wide=not plan.narrow)
    # Narrow numbers that this CPU cannot multiply are copied first.
    copied = dtype != torch.float32 and not plan.narrow
    given = [t.to(torch.float32) if copied else t for t in (x.q, x.k, x.v)]
    if others or not all(map(_lies_like, (piece.q, piece.k, piece.v), given)):
        # Rows must be put side by side first, or some heads after others.
        return None
    packed = Packed.of(piece, plan, backward=False)
    B, H, Q, E, threads = plan.B, plan.H, plan.Q, plan.E, plan.threads
    scratch = x.v.new_empty(plan.scratch, dtype=torch.float32)
    alike = bytes(Attend(**described(x, loop, piece, plan, scratch, packed)))
    parts = [*lots(piece, plan)]
    tiles, rows = -(-Q // plan.rows), B * H * Q
    room = Room(plan, rows, packed, statistics=statistics)
    apart = table_step(rows, _FLOAT) * _FLOAT
    out_dtype = dtype if plan.narrow else torch.float32
    narrow, multiplied_by = plan.narrow, _narrow_product(plan, loop)

    def again(q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        if loop_for(q.device, torch.float32) is not loop:
            return plainly(q, k, v)
        if narrow and _narrow_product(plan, loop) != multiplied_by:
            return plainly(q, k, v)
        # Held until the call is over.
        tensors = [t.to(torch.float32) for t in (q, k, v)] if copied else (q, k, v)
        out = v.new_empty((B, H, Q, E), dtype=out_dtype)
        memory = v.new_empty(room.size, dtype=torch.float32)
        call = Attend.from_buffer_copy(alike)
        addresses = [t.data_ptr() for t in tensors]
        if narrow:
            call.q_halves, call.k_halves, call.v_halves = addresses
            call.out_halves = out.data_ptr()
        else:
            call.q, call.k, call.v = addresses
            call.out = out.data_ptr()
        room.put(call, memory.data_ptr())
        if statistics:
            table = empty_table(v, B, H, Q, dtype=torch.float32)
            place = table.data_ptr()
            call.largest, call.entropy, call.lse = place, place + apart, place + 2 * apart
        for lot in parts:
            step(lot.first, tiles)
            lot.put(call)
            if not loop.attend(call, threads):
                return plainly(q, k, v)
        out = out.to(dtype) if copied else out
        return Tabled(out, table) if statistics else out

    return again


class Room:
    """Memory that a call has for itself, and where in it each thing lies: scratch memory, what
    rounding took from lse (for gradients that nobody asks for), lse where nobody asks for that
    either, and packed matrices."""

    def __init__(self, plan: Plan, rows: int, packed: Packed | None, *, statistics: bool) -> None:
        sizes = {"scratch": plan.scratch, "rest": rows, "lse": 0 if statistics else rows}
        if packed is not None:
            sizes |= {name: -(-t.nbytes // _FLOAT) for name, t in packed.memory.items()}
        self.places: list[tuple[str, int]] = []
        self.size = 0
        for name, size in sizes.items():
            self.places.append((name, self.size * _FLOAT))
            self.size += -(-size // _LINE) * _LINE

    def put(self, call: Attend, address: int) -> None:
        for name, offset in self.places:
            setattr(call, name, address + offset)


def _narrow_product(plan: Plan, loop: Loop) -> int | None:
    """Where that is which multiplies narrow matrices; oneDNN can be switched off between calls."""
    if plan.product is Product.PACKED:
        on = torch._C._get_mkldnn_enabled()
        return loop.multiply_packed.get(plan.dtype) if on else None
    return loop.multiply_halves.get(plan.dtype)


def _lies_like(part: Tensor, whole: Tensor) -> bool:
    """Whether rows of a tensor were taken as they lie, and all of them."""
    return part.shape == whole.shape and part.stride() == whole.stride()
