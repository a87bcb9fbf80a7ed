"""Plain calls that come again: all that calls of a kind share is made ready once, and each of them
needs no more than memory of its own and the addresses of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.contract import Repeated, Rows, Tabled, empty_table, table_step
from regard.backends.tiled.fused import described, fusing
from regard.backends.tiled.loop import Attend, loop_for
from regard.backends.tiled.pieces import lots, pieces
from regard.backends.tiled.plan import Plan
from regard.backends.tiled.walk import takes_all
from regard.inputs import AttentionInputs
from regard.stopping import step


def prepared(x: AttentionInputs, plainly: Repeated, *, statistics: bool) -> Repeated | None:
    """How calls of this one's kind run as a whole in C; None where each of them must be looked at.
    `plainly` runs those in which a masked value may have done harm."""
    loop = fusing(x)
    if loop is None or x.needs_grad or x.sink is not None:
        return None
    if any(t.dtype != torch.float32 for t in (x.q, x.k, x.v)):
        return None
    plan = Plan.of(x, loop)
    if plan.band is None and not takes_all(x, plan.rows):
        # Tables of what a mask hides may be large.
        return None
    piece, *others = pieces(x, plan)
    if others or not all(map(_is_where, (piece.q, piece.k, piece.v), (x.q, x.k, x.v))):
        # Rows must be put side by side first.
        return None
    B, H, Q, E, threads = plan.B, plan.H, plan.Q, plan.E, plan.threads
    scratch = x.v.new_empty(plan.scratch)
    alike = bytes(Attend(**described(x, loop, piece, plan, scratch, None)))
    parts = [*lots(piece, plan)]
    tiles, rows, number = -(-Q // plan.rows), B * H * Q, scratch.element_size()
    # Behind scratch memory lies what rounding took from lse, for gradients that nobody asks for;
    # and where nobody asks for statistics, lse too.
    size, behind = plan.scratch + rows * (1 if statistics else 2), plan.scratch * number
    apart = table_step(rows, number) * number

    def again(q: Tensor, k: Tensor, v: Tensor) -> Rows | Tensor:
        if loop_for(q.device, torch.float32) is not loop:
            return plainly(q, k, v)
        out, memory = v.new_empty((B, H, Q, E)), v.new_empty(size)
        held = memory.data_ptr()
        call = Attend.from_buffer_copy(alike)
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.out, call.scratch, call.rest = out.data_ptr(), held, held + behind
        call.lse = held + behind + rows * number
        if statistics:
            table = empty_table(v, B, H, Q, dtype=v.dtype)
            place = table.data_ptr()
            call.largest, call.entropy, call.lse = place, place + apart, place + 2 * apart
        for lot in parts:
            step(lot.first, tiles)
            lot.put(call)
            if not loop.attend(call, threads):
                return plainly(q, k, v)
        return Tabled(out, table) if statistics else out

    return again


def _is_where(part: Tensor, whole: Tensor) -> bool:
    """Whether a part of a tensor is all of it, in its own memory."""
    return (
        part.data_ptr() == whole.data_ptr()
        and part.shape == whole.shape
        and part.stride() == whole.stride()
    )
