"""The forward pass in one kernel: output, log-sum-exp, largest logit and entropy of every row.

Each program owns a tile of queries and walks over the keys it may see: first the tiles that all
its queries see whole, then the partial ones. README.md derives the sums it keeps. Plain calls on
Hopper have a kernel of their own, which goes another way.

Few queries against many keys would leave the card idle, so there the query heads of a group are
packed into one tile and the keys split over programs, whose sums a second kernel merges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.triton import MOST, cudnn
from regard.backends.triton.arguments import (
    added,
    describable,
    dropping,
    score,
    sheet,
    sizes,
    tiles_of,
    wide,
)
from regard.backends.triton.forward_kernels import Parts, Written, forward_tiles, mend, merge
from regard.backends.triton.hopper.forward import run_on_hopper
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import MANY
from regard.backends.triton.rules import ALL
from regard.backends.triton.tuning import Forward, forward_settings
from regard.errors import RegardError
from regard.inputs import AttentionInputs


def forward(x: AttentionInputs, *, statistics: bool) -> tuple[Rows, Tensor]:
    """Output and row statistics, and what the backward pass needs beside them."""
    if x.shape.B * x.shape.H > MOST:
        raise RegardError(
            "triton has no programs for so many heads of all sequences",
            got=f"{x.shape.B} sequences of {x.shape.H} heads",
            accepted=f"{MOST:,} at most, in a compiled call",
            do="split the batch",
        )
    return run(x, forward_settings(x, statistics=statistics), statistics=statistics)


def run(x: AttentionInputs, how: Forward, *, statistics: bool) -> tuple[Rows, Tensor]:
    """The forward pass with given settings."""
    B, H, Q, _ = x.shape
    D, E = x.q.shape[-1], x.v.shape[-1]
    n = sizes(x)
    if how.cudnn:
        out, lse = cudnn.forward(x)
    else:
        out, lse = empty_out(x.q, x.v), x.q.new_empty(B, H, Q, dtype=torch.float32)
    norm = lse.new_empty(2, B, H, Q)
    largest, entropy = (torch.empty_like(lse) if statistics else lse.new_empty(0) for _ in range(2))
    q, k, v = sheet(x.q), sheet(x.k), sheet(x.v)
    described = how.described and describable(x.k) and describable(x.v)
    ks: Any = _described(x.k, how.keys, wide(D)) if described else k
    vs: Any = _described(x.v, how.keys, wide(E)) if described else v
    to = Written(lse, largest, entropy, norm)
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
    tiles = tiles_of(Q * (x.group if how.packed else 1), how.rows)
    programs = B * (x.k.shape[1] if how.packed else H)
    parts = Parts(None, None)
    if how.splits > 1:
        parts = Parts(lse.new_empty(how.splits, B, H, Q, E), lse.new_empty(3, how.splits, B, H, Q))
    may_leak = how.splits == 1 and (rule.kind is not ALL or rule.limits is not None)
    flags = taken = None
    if how.hopper:
        # How many tiles are taken, and behind 16 bytes, where tensors start, a flag for each tile.
        marks = 4 + may_leak * programs * tiles
        taken = torch.zeros(marks, dtype=torch.int32, device=x.q.device)
        flags = taken[4:] if may_leak else None
    elif may_leak and not how.cudnn:
        flags = torch.empty(programs * tiles, dtype=torch.int8, device=x.q.device)
    to_out = sheet(out)
    rest = (to_out, to, parts, flags, rule, added(x), x.sink, dropping(x), score(x))
    constants: dict[str, Any] = {
        "D": D, "E": E, "BD": wide(D), "BE": wide(E), "BM": how.rows, "BN": how.keys,
        "STATISTICS": statistics, "PACKED": how.packed, "SPLITS": how.splits,
        "PRECISION": how.precision,
    }  # fmt: skip
    if taken is not None:
        items = tiles * programs
        run_on_hopper(x, to_out, to, taken, flags, rule, items, how, statistics=statistics)
    elif not how.cudnn:
        forward_tiles[(tiles, programs, how.splits)](
            q, ks, vs, *rest, n, **constants, DESCRIBED=described,
            STAGES=how.stages, num_warps=how.warps, num_stages=how.stages, maxnreg=how.registers,
        )  # fmt: skip
    if may_leak:
        mend[(tiles_of(tiles, MANY), programs, 1)](
            q, k, v, *rest, n, tiles, **constants, MANY=MANY, num_warps=8, num_stages=1
        )
    if how.splits > 1:
        merge[(B * H * Q,)](
            to_out, to, parts, x.sink, n, B * H * Q, E=E, BE=wide(E), SPLITS=how.splits,
            STATISTICS=statistics,
        )  # fmt: skip
    return Rows(out, lse, largest, entropy), norm


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Fresh memory for the output: laid out like the queries, if it has their shape."""
    if q.shape[-1] == v.shape[-1] and q.dtype == v.dtype:
        fresh = torch.empty_like(q)
        if fresh.stride(-1) == 1:
            return fresh
    return v.new_empty(*q.shape[:3], v.shape[-1])


def _described(t: Tensor, rows: int, wide: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, wide])
