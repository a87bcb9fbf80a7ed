"""The backward pass: two kernels that compute the weights again from q, k and the row norms.

One owns a tile of keys and loops over the queries that see it (gradients of keys and values), the
other owns a tile of queries and loops over its keys (gradients of queries and of the bias). No
program adds to what another writes, so gradients are the same in every run; only a relative table,
and a dense bias that several rows, heads or batch entries share, are added up by atomics. Those are
refused where PyTorch is asked for deterministic algorithms.

On Hopper, unless such algorithms or a gradient of the bias are asked for, one kernel does both: it
owns keys, and adds each tile's part of the gradients of queries to sums in float32. That takes five
products for a tile of pairs instead of seven.

With p the weights, D = g_out·out - g_lse and E = lse - entropy,

    ∂/∂s = p · (g_out·v - D - g_entropy (s - E))        s - E = log p + entropy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from regard.backends.contract import Rows
from regard.backends.passes import Given, Pull
from regard.backends.triton import cudnn
from regard.backends.triton.arguments import (
    added,
    broadcast_strides,
    describable,
    described_by_rows,
    dropping,
    score,
    sheet,
    sizes,
    tiles_of,
    wide,
)
from regard.backends.triton.gradients.key_gradients import keys_and_values, rounded
from regard.backends.triton.gradients.query_gradients import queries
from regard.backends.triton.gradients.row_numbers import BiasGradient, RowNumbers, row_shift
from regard.backends.triton.hopper.backward import pull_on_hopper
from regard.backends.triton.launches.launched import together
from regard.backends.triton.layout import rule_of
from regard.backends.triton.pairs import INTERPRETED, LN2, LOG2E, MANY
from regard.backends.triton.refusals import is_shared
from regard.backends.triton.rules import ALL
from regard.backends.triton.settings.tuning import (
    AtOnce,
    at_once,
    backward_settings,
    forward_settings,
    mending_settings,
)
from regard.biases.alibi import Alibi
from regard.biases.dense import Dense
from regard.biases.relative import Relative
from regard.inputs import AttentionInputs


class Memory(NamedTuple):
    """What a backward pass writes to."""

    q: Tensor
    k: Tensor
    v: Tensor
    shift: Tensor | None
    """A number per row. Mending what cuDNN found hardly ever needs one, and goes without."""
    key_flags: Tensor | None
    """One for each tile of keys that a hidden NaN may have spoilt."""
    query_flags: Tensor | None
    sums: Tensor | None
    """Gradients of queries in float32, where one kernel computes all gradients; 0 at first."""


def backward(x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull, *, bias: bool) -> Given:
    """Gradients of everything a call can learn."""
    g_out, g_lse, g_entropy = pull
    if g_out is None:
        g_out = torch.zeros_like(rows.out)
    g_lse = None if g_lse is None else g_lse.contiguous()
    g_entropy = None if g_entropy is None else g_entropy.contiguous()
    norm = norm_of(x, rows, kept)
    expected = None if g_entropy is None else expected_logit(rows, norm)
    given_bias = _bias_gradient(x) if bias else None
    by_cudnn = cudnn.runs_backward(x, pull)
    found = cudnn.backward(x, rows, g_out) if by_cudnn else None
    once = at_once(x)
    apart = given_bias is not None or (g_entropy is not None and once is not None and once.hopper)
    to = memory_for(x, rows, found, apart=apart)
    numbers = RowNumbers(norm, to.shift, g_entropy, expected, rows.lse.numel(), rows.lse)
    launch(x, rows, g_out, g_lse, numbers, to, given_bias, by_cudnn=by_cudnn)
    if given_bias is not None and isinstance(x.bias, Alibi):
        given_bias = given_bias.sum((0, 2))
    d_sink = _sink_gradient(x, norm, to.shift, g_entropy, expected)
    return Given(to.q, to.k, to.v, d_sink, [], [] if given_bias is None else [given_bias])


def memory_for(
    x: AttentionInputs,
    rows: Rows,
    found: tuple[Tensor, Tensor, Tensor] | None,
    *,
    apart: bool = False,
) -> Memory:
    """Fresh memory for a pass, or where cuDNN gave gradients, these and the rest. `apart` asks for
    two kernels."""
    dq, dk, dv = found or (_empty_rows(t) for t in (x.q, x.k, x.v))
    # A sink's own gradient is made of the shifts of all rows.
    shift = torch.empty_like(rows.lse) if found is None or x.sink is not None else None
    if found is not None:
        return Memory(dq, dk, dv, shift, None, None, None)
    sums = None
    if not apart and at_once(x) is not None:
        sums = torch.zeros(x.q.shape, dtype=torch.float32, device=x.q.device)
    if x.mask is None:
        return Memory(dq, dk, dv, shift, None, None, sums)
    grids = _grids(x, None if sums is None else at_once(x))
    of_keys, of_queries = (
        torch.empty(across * down, dtype=torch.int8, device=x.q.device) for across, down in grids
    )
    return Memory(dq, dk, dv, shift, of_keys, of_queries, sums)


def _grids(x: AttentionInputs, once: AtOnce | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tiles of keys, and of queries, and the programs that have them."""
    how, (B, H, Q, K) = backward_settings(x), x.shape
    of_keys = tiles_of(K, (once or how.keys).keys), B * x.k.shape[1]
    return of_keys, (tiles_of(Q, how.queries.rows), B * H)


def launch(
    x: AttentionInputs,
    rows: Rows,
    g_out: Tensor,
    g_lse: Tensor | None,
    numbers: RowNumbers,
    to: Memory,
    given_bias: Tensor | None,
    *,
    by_cudnn: bool,
) -> None:
    """Write a backward pass to memory; where cuDNN did, only what a hidden NaN may have spoilt."""
    how, once = backward_settings(x), None if to.sums is None else at_once(x)
    B, H, Q, _ = x.shape
    D, E = x.q.shape[-1], x.v.shape[-1]
    n, g, out = sizes(x), sheet(g_out), sheet(rows.out)
    tensors = (sheet(x.q), sheet(x.k), sheet(x.v), g)
    widths: dict[str, Any] = {"D": D, "E": E, "BD": wide(D), "BE": wide(E)}
    widths["PRECISION"] = how.precision
    of_keys, of_queries = _grids(x, once)
    with together():
        if to.shift is not None:
            row_shift[(tiles_of(Q, 64), B * H)](out, g, g_lse, to.shift, n, E=E, BE=wide(E), BM=64)
        if by_cudnn:
            _mend(x, tensors, numbers, to, out, widths)
            return
        for kernel, tile, grid, flags, own in (
            (keys_and_values, once or how.keys, of_keys, to.key_flags,
             (None, sheet(to.k), sheet(to.v))),
            (queries, how.queries, of_queries, to.query_flags,
             (sheet(to.q), _to_bias(x, given_bias))),
        ):  # fmt: skip
            by_keys = kernel is keys_and_values
            rule = rule_of(x.mask, x.shape, (tile.rows, tile.keys), x.q.device, by_keys=by_keys)
            may_leak = rule.kind is not ALL or rule.limits is not None
            flags = flags if may_leak else None
            rest = (numbers, flags, rule, added(x), dropping(x), score(x), n, out, grid[0])
            size = {"BM": tile.rows, "BN": tile.keys, "num_warps": tile.warps}
            kind = {"DESCRIBED": False} if by_keys else {}
            if once is not None and to.sums is not None:
                if by_keys:
                    _launch_at_once(x, once, grid, g_out, to, rest, widths | size)
                else:
                    rounded[grid](
                        sheet(to.sums), sheet(to.q), flags, score(x), n, grid[0],
                        D=D, BD=wide(D), BM=tile.rows,
                    )  # fmt: skip
            else:
                kernel[grid](
                    *tensors, *own, *rest, **widths, **size, **kind, STAGES=tile.stages, MANY=0,
                    num_stages=tile.stages,
                )  # fmt: skip
            if may_leak:
                kernel[(tiles_of(grid[0], MANY), grid[1])](
                    *tensors, *own, *rest, **widths, **size, **kind, STAGES=1, MANY=MANY,
                    num_stages=1,
                )  # fmt: skip


def _mend(
    x: AttentionInputs,
    tensors: tuple[Any, ...],
    numbers: RowNumbers,
    to: Memory,
    out: Any,
    widths: dict[str, Any],
) -> None:
    """Compute gradients of queries again that cuDNN found where a NaN hid from them.

    Those of keys are as they must be. Under a causal mask the last query sees every key, so a NaN
    in one is in its output too, and in D: in all of its slopes, and what these are multiplied with.
    """
    B, H, Q, _ = x.shape
    how = mending_settings(x)
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=False)
    if rule.kind is ALL and rule.limits is None:
        return
    tiles = tiles_of(Q, how.rows)
    queries[(tiles_of(tiles, MANY), B * H)](
        *tensors, sheet(to.q), _to_bias(x, None), numbers, None, rule, added(x), dropping(x),
        score(x), sizes(x), out, tiles, **widths, BM=how.rows, BN=how.keys, STAGES=1, MANY=MANY,
        num_warps=how.warps, num_stages=1,
    )  # fmt: skip


def _launch_at_once(
    x: AttentionInputs,
    how: AtOnce,
    grid: tuple[int, int],
    g_out: Tensor,
    to: Memory,
    rest: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """The kernel that owns keys, and adds to the gradients of queries too."""
    assert to.sums is not None
    if how.hopper:
        numbers, flags, rule, bias, drop, scoring, n, *_ = rest
        g_out = g_out if describable(g_out) else g_out.contiguous()
        pull_on_hopper(
            x, g_out, to.sums, to.k, to.v, numbers, flags, rule, (bias, scoring, drop, n), grid
        )
        return
    q: Any = sheet(x.q)
    g: Any = sheet(g_out)
    sums: Any = sheet(to.sums)
    described = how.described and all(map(describable, (x.q, g.ptr, to.sums)))
    if described:
        q = described_by_rows(x.q, how.rows, constants["BD"])
        g = described_by_rows(g.ptr, how.rows, constants["BE"])
        if not INTERPRETED.value:
            sums = described_by_rows(to.sums, how.rows, constants["BD"])
    keys_and_values[grid](
        q, sheet(x.k), sheet(x.v), g, sums, sheet(to.k), sheet(to.v), *rest, **constants,
        DESCRIBED=described, STAGES=how.stages, MANY=0, num_stages=how.stages,
        maxnreg=how.registers,
    )  # fmt: skip


def norm_of(x: AttentionInputs, rows: Rows, kept: Tensor) -> Tensor | None:
    """The shift and one over the sum of each row. cuDNN's forward pass keeps none: there the
    shift is lse."""
    if rows.entropy.numel():
        return kept
    return kept if kept.numel() and not forward_settings(x, statistics=False).cudnn else None


def expected_logit(rows: Rows, norm: Tensor | None) -> Tensor:
    """By how much the logit that is expected lies below 0, shifted as logits are for the weights.
    (Not lse - entropy: beside the least numbers nothing would be left of what logits differ by.)"""
    expected = rows.entropy if norm is None else rows.entropy + norm[1].log()
    # A row that sees nothing expects nothing; its weights are all 0.
    return torch.where(expected.isfinite() | expected.isnan(), expected, 0.0)


def _empty_rows(t: Tensor) -> Tensor:
    """Fresh memory laid out like t, unless kernels could not write rows to that."""
    fresh = torch.empty_like(t)
    return fresh if fresh.stride(-1) == 1 else fresh.new_empty(t.shape)


def _bias_gradient(x: AttentionInputs) -> Tensor:
    assert x.bias is not None
    if isinstance(x.bias, (Dense, Relative)):
        return torch.zeros_like(x.bias.tensors()[0], dtype=torch.float32)
    B, H, Q, _ = x.shape
    return torch.empty(B, H, Q, dtype=torch.float32, device=x.q.device)


def _to_bias(x: AttentionInputs, t: Tensor | None) -> BiasGradient:
    no = tl.constexpr(False)
    if t is None:
        return BiasGradient(None, 0, 0, 0, 0, no)
    if isinstance(x.bias, Relative):
        return BiasGradient(t, 0, 0 if t.shape[0] == 1 else t.stride(0), 0, 0, no)
    if isinstance(x.bias, Dense):
        shared = tl.constexpr(is_shared(x.bias, x.shape))
        return BiasGradient(t, *broadcast_strides(t), shared)
    return BiasGradient(t, 0, 0, 0, 0, no)


def _sink_gradient(
    x: AttentionInputs,
    norm: Tensor | None,
    shift: Tensor | None,
    g_entropy: Tensor | None,
    expected: Tensor | None,
) -> Tensor | None:
    """The sink is a key without a value: its weight times what every weight is shifted by."""
    if x.sink is None:
        return None
    assert norm is not None
    assert shift is not None
    sink = x.sink.to(torch.float32)[:, None]
    shifted = sink * LOG2E.value - norm[0]
    p = torch.exp2(shifted) * norm[1]
    ds = -shift
    if g_entropy is not None:
        assert expected is not None
        ds = ds - g_entropy * (shifted * LN2.value + expected)
    # A sink of minus infinity is none.
    return (p * ds).masked_fill(sink == -math.inf, 0.0).sum((0, 2))
