"""The forward pass in one kernel: output, log-sum-exp, largest logit and entropy of every row.

Each program owns a tile of queries and loops over the keys it may see: first the tiles that all
its queries see whole, then the partial ones. README.md derives the sums it keeps. Plain calls on
Hopper have a kernel of their own, which goes another way.

Few queries against many keys would leave the card idle, so there the query heads of a group are
packed into one tile and the keys split over programs, whose sums a second kernel merges.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.backends.contract import Noted, Rows, Weighed
from regard.backends.triton import cudnn
from regard.backends.triton.arguments import (
    added,
    describable,
    described_by_rows,
    dropping,
    score,
    sheet,
    sizes,
    tiles_of,
    wide,
)
from regard.backends.triton.forward_kernels import Parts, Written, forward_tiles, mend, merge
from regard.backends.triton.hopper.columns import Beside
from regard.backends.triton.hopper.forward import run_on_hopper
from regard.backends.triton.launches.launched import together
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import MANY
from regard.backends.triton.refusals import MOST
from regard.backends.triton.rules import ALL, TILES, Rule
from regard.backends.triton.settings.tuning import Forward, forward_settings, processors
from regard.errors import RegardError
from regard.inputs import AttentionInputs

_SMALL = 64
"""Queries and keys of a tile that is mended: such tiles compile in a third of the time."""


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


def mixes_columns(x: AttentionInputs) -> bool:
    """Whether a kernel mixes columns of numbers beside the values of a call."""
    how = forward_settings(x, statistics=True)
    return how.hopper and how.splits == 1 and x.sink is None


def weighed(x: AttentionInputs, columns: Float[Tensor, "b h k c"]) -> Weighed:
    """The forward pass of a call of which `mixes_columns`, and what all rows together have of each
    column."""
    how = forward_settings(x, statistics=True)
    # Columns take memory too, which wide heads have for two stages of all.
    stages = how.stages if wide(x.q.shape[-1]) <= 64 else 2
    how = replace(how, stages=stages, queued=False)
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
    to = memory_for(x, how, rule, statistics=True)
    beside = Beside.of(columns, x.q.dtype, x.shape.Q, how.rows)
    launch(x, how, rule, to, statistics=True, beside=beside)
    found = Weighed(*to.rows())
    found.columns = beside.total(columns.shape[-1])
    return found


class Memory(NamedTuple):
    """What a forward pass writes to."""

    out: Tensor
    lse: Tensor
    norm: Tensor
    largest: Tensor
    entropy: Tensor
    first: Tensor | None
    """The first key's logit, where the kernel gives it at no cost."""
    marks: Tensor | None
    """A flag for each tile of queries; on Hopper behind a count of the tiles that are taken."""
    mixed: Tensor | None
    sums: Tensor | None

    def rows(self) -> Rows:
        found = self.out, self.lse, self.largest, self.entropy
        if self.first is None:
            return Rows(*found)
        noted = Noted(*found)
        noted.first = self.first
        return noted


def run(x: AttentionInputs, how: Forward, *, statistics: bool) -> tuple[Rows, Tensor]:
    """The forward pass with given settings."""
    found = cudnn.forward(x.q, x.k, x.v, *cudnn.scale_and_causal(x)) if how.cudnn else None
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
    to = memory_for(x, how, rule, statistics=statistics, found=found)
    launch(x, how, rule, to, statistics=statistics)
    return to.rows(), to.norm


def memory_for(
    x: AttentionInputs,
    how: Forward,
    rule: Rule,
    *,
    statistics: bool,
    found: tuple[Tensor, Tensor] | None = None,
    keeps: bool = True,
) -> Memory:
    """Fresh memory for a pass, or where cuDNN has attended, what it found and the rest. `keeps`
    says whether the backward pass may be ours."""
    B, H, Q, _ = x.shape
    if found is None:
        out, lse = empty_out(x.q, x.v), x.q.new_empty(B, H, Q, dtype=torch.float32)
    else:
        out, lse = found
    largest, entropy = (torch.empty_like(lse) if statistics else lse.new_empty(0) for _ in range(2))
    first = marks = mixed = sums = None
    if (
        statistics
        and not (how.hopper or how.cudnn or _described(x, how))
        and rule.kind is not TILES
    ):
        first = torch.empty_like(lse)
    flags = _programs(x, how) * _tiles(x, how)
    if how.hopper and _counts(x, how):
        # Tensors start at multiples of 16 bytes, and so do the flags behind the count.
        size = 4 + may_leak(how, rule) * flags
        marks = torch.zeros(size, dtype=torch.int32, device=x.q.device)
    elif may_leak(how, rule) and not (how.hopper or how.cudnn):
        marks = torch.empty(flags, dtype=torch.int8, device=x.q.device)
    if how.splits > 1:
        mixed = lse.new_empty(how.splits, B, H, Q, x.v.shape[-1])
        sums = lse.new_empty(3, how.splits, B, H, Q)
    norm = lse.new_empty(2, B, H, Q) if keeps or found is None else lse.new_empty(0)
    return Memory(out, lse, norm, largest, entropy, first, marks, mixed, sums)


def _counts(x: AttentionInputs, how: Forward) -> bool:
    """Whether programs on Hopper count which tiles are taken: unless each takes one split of the
    keys, and there is one for all of these."""
    return how.splits == 1 or _programs(x, how) * _tiles(x, how) * how.splits > processors(
        x.q.device
    )


def _described(x: AttentionInputs, how: Forward) -> bool:
    """Whether the copy engine reads keys and values."""
    return how.described and describable(x.k) and describable(x.v)


def may_leak(how: Forward, rule: Rule) -> bool:
    """Whether a hidden NaN may reach other rows, to be mended."""
    sure = how.careful or how.splits > 1
    return not sure and (rule.kind is not ALL or rule.limits is not None)


def _tiles(x: AttentionInputs, how: Forward) -> int:
    return tiles_of(x.shape.Q * (x.group if how.packed else 1), how.rows)


def _programs(x: AttentionInputs, how: Forward) -> int:
    return x.shape.B * (x.k.shape[1] if how.packed else x.shape.H)


def launch(
    x: AttentionInputs,
    how: Forward,
    rule: Rule,
    to: Memory,
    *,
    statistics: bool,
    beside: Beside | None = None,
) -> None:
    """Write a forward pass to memory, by one kernel or several."""
    B, H, Q, _ = x.shape
    D, E = x.q.shape[-1], x.v.shape[-1]
    n = sizes(x)
    tiles, programs = _tiles(x, how), _programs(x, how)
    q, k, v, out = sheet(x.q), sheet(x.k), sheet(x.v), sheet(to.out)
    norm = to.norm if to.norm.numel() else None
    written = Written(to.lse, to.largest, to.entropy, norm, to.first)
    parts = Parts(to.mixed, to.sums)
    leaks = may_leak(how, rule)
    flags = to.marks
    if how.hopper:
        # Without flags the compiler orders the loop over keys better: a kernel of its own.
        flags = to.marks[4:] if leaks and to.marks is not None else None
    rest = (out, written, parts, flags, rule, added(x), x.sink, dropping(x), score(x), n)
    constants: dict[str, Any] = {
        "D": D, "E": E, "BD": wide(D), "BE": wide(E), "STATISTICS": statistics,
        "PACKED": how.packed, "PRECISION": how.precision,
    }  # fmt: skip
    described = _described(x, how)
    with together():
        if how.hopper:
            items = tiles * programs * how.splits
            run_on_hopper(
                x, to.out, written, parts, to.marks, flags, rule, items, how,
                statistics=statistics, beside=beside,
            )  # fmt: skip
        elif not how.cudnn:
            forward_tiles[(tiles, programs, how.splits)](
                q,
                described_by_rows(x.k, how.keys, wide(D)) if described else k,
                described_by_rows(x.v, how.keys, wide(E)) if described else v,
                *rest, **constants, BM=how.rows, BN=how.keys, SPLIT=how.splits > 1,
                CAREFUL=how.careful, DESCRIBED=described, STAGES=how.stages, num_warps=how.warps,
                num_stages=how.stages, maxnreg=how.registers,
            )  # fmt: skip
        if leaks:
            small = rule.kind is not TILES and how.rows > _SMALL
            rows, keys = (_SMALL, _SMALL) if small else (how.rows, how.keys)
            mend[(tiles_of(tiles, MANY), programs, 1)](
                q, k, v, *rest, tiles, **constants, BM=rows, BN=keys, MANY=MANY,
                SHARES=how.rows // rows, num_warps=4 if small else 8, num_stages=1,
            )  # fmt: skip
        if how.splits > 1:
            merge[(B * H * Q,)](
                out, written, parts, x.sink, n, B * H * Q, how.splits, E=E, BE=wide(E),
                MOST=16 if how.splits <= 16 else 64, STATISTICS=statistics,
            )  # fmt: skip


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Fresh memory for the output: laid out like the queries, if it has their shape."""
    if q.shape[-1] == v.shape[-1] and q.dtype == v.dtype:
        fresh = torch.empty_like(q)
        if fresh.stride(-1) == 1:
            return fresh
    return v.new_empty(*q.shape[:3], v.shape[-1])
