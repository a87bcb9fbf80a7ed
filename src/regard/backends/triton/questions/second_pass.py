"""Questions about the weights, answered by one more pass over q and k with the log-sum-exp known.

What each key received owns a tile of keys and sums over queries; the other questions own a tile of
queries. Nothing of size n×n is written. Other questions have files of their own beside this one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.contract import Pool, Rows, Top, Weighed
from regard.backends.exactness import widened
from regard.backends.questions.matching_keys import MatchingKeys
from regard.backends.tiled.second_pass import TiledPass
from regard.backends.triton.arguments import (
    added,
    constants_of,
    on_card,
    score,
    sheet,
    sizes,
    tiles_of,
)
from regard.backends.triton.forward import mixes_columns, weighed
from regard.backends.triton.hopper.columns import MOST as MOST_COLUMNS
from regard.backends.triton.hopper.received import received_on_hopper
from regard.backends.triton.launches.launched import launched, recorded
from regard.backends.triton.layout import is_compact, rule_of
from regard.backends.triton.pairs import (
    INTERPRETED,
    LN2,
    load_rows,
    logits_of,
    norms,
    product,
)
from regard.backends.triton.questions.head_sums import kind_of_sums, memory_for_sums, sums_of_heads
from regard.backends.triton.questions.maps import pooled_map
from regard.backends.triton.questions.mean_logits import mean_logits
from regard.backends.triton.questions.pair_sums import matching_mass, offset_sums
from regard.backends.triton.questions.top_keys import MOST, top_keys
from regard.backends.triton.questions.value_forms import WIDEST, value_forms
from regard.backends.triton.refusals import why_not
from regard.backends.triton.replay.steps import Step, launch_again, steps_of
from regard.backends.triton.rules import (
    allowed,
    full_at,
    limit_of,
    part_at,
    rows_for,
    runs_of,
)
from regard.backends.triton.settings.tuning import fits_hopper, looking_settings
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.transforms import may_learn, transformed


@launched
@triton.jit
def _received(
    q, k, lse, out, rule, bias, scoring, n,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a tile of keys got from all queries of one head. Keys are rows."""
    tile = tl.program_id(0)
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tile * BN
    last = tl.minimum(first + BN, n.keys) - 1
    key = first + tl.arange(0, BN)
    ks = load_rows(k, b, h // n.group, first, n.keys, D, BD, BN, False)
    total = tl.zeros((BN,), tl.float32)
    full, part, limit, path = rows_for(rule, n, b, h, tile, first, last, BM)
    base = tl.program_id(1).to(tl.int64) * n.queries
    for i in tl.range(full, num_stages=STAGES):
        start = full_at(rule, path, i, BM)
        row = start + tl.arange(0, BM)
        qs = load_rows(q, b, h, start, n.queries, D, BD, BM, True)
        norm = norms(lse, base + row, row < n.queries)
        heads = (h + tl.zeros_like(row))[None, :]
        s = product(ks, qs.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, row[None, :], key[:, None], n)
        total += tl.sum(tl.exp2(s - norm[None, :]), 1)
    for i in tl.range(part, num_stages=STAGES):
        start, table = part_at(rule, path, i, BM)
        row = start + tl.arange(0, BM)
        qs = load_rows(q, b, h, start, n.queries, D, BD, BM, False)
        norm = norms(lse, base + row, row < n.queries)
        heads = (h + tl.zeros_like(row))[None, :]
        s = product(ks, qs.T, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, row[None, :], key[:, None], n)
        seen = allowed(rule, row[None, :], key[:, None], limit, table, BM, BN)
        seen &= (row < n.queries)[None, :]
        p = tl.exp2(tl.where(seen, s, float("-inf")) - norm[None, :])
        total += tl.sum(tl.where(seen, p, 0.0), 1)
    at = tl.program_id(1).to(tl.int64) * n.keys + key
    tl.store(out + at, total, mask=key < n.keys)


@launched
@triton.jit
def _mass(
    q, k, lse, keys, out, rule, bias, scoring, n, many,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    """What falls from each query on the keys of a list (without one, on the first key), or the
    largest of their logits."""
    b, h = tl.program_id(1) // n.heads, tl.program_id(1) % n.heads
    first = tl.program_id(0) * BM
    row = first + tl.arange(0, BM)
    place, heads = row[:, None], (h + tl.zeros_like(row))[:, None]
    qs = load_rows(q, b, h, first, n.queries, D, BD, BM, False)
    limit = limit_of(rule, n, b)
    at = tl.program_id(1).to(tl.int64) * n.queries + row
    if not LOGITS:
        norm = norms(lse, at, row < n.queries)[:, None]
    base = k.ptr + b.to(tl.int64) * k.batch + (h // n.group).to(tl.int64) * k.head
    column = tl.arange(0, BD)[:, None]
    total = tl.full((BM,), float("-inf") if LOGITS else 0.0, tl.float32)
    for start in range(0, many, BN):
        slot = start + tl.arange(0, BN)
        key = 0 * slot[None, :]
        if keys is not None:
            key = tl.load(keys + slot, mask=slot < many, other=0).to(tl.int32)[None, :]
        ks = tl.load(base + key.to(tl.int64) * k.row + column, mask=column < D, other=0.0)
        s = product(qs, ks, None, PRECISION)
        s, _ = logits_of(s, scoring, bias, b, heads, place, key, n)
        seen = (
            allowed(rule, place, key, limit, runs_of(rule, b, h), BM, BN) & (slot < many)[None, :]
        )
        if LOGITS:
            total = tl.maximum(total, tl.max(tl.where(seen, s * LN2, float("-inf")), 1))
        else:
            total += tl.sum(tl.where(seen, tl.exp2(s - norm), 0.0), 1)
    tl.store(out + at, total, mask=row < n.queries)


class TritonPass(TiledPass):
    """The tiled answers, with kernels for those that look at every pair or are asked for often.

    `weights` looks only at what was asked for: plain products serve it well. So they do where
    logits are too large for float32, which is all that the kernels compute in.
    """

    def mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], keys: Int[Tensor, "k"]
    ) -> Float[Tensor, "b h q"]:
        x = inputs
        inside = (*x.tensors(), lse)
        learns = may_learn(inside) or transformed(inside)
        if learns or not len(keys) or not _is_compact(x) or not _exact_in_float32(x, lse):
            return super().mass(x, lse, keys)
        return _of_keys(x, lse, keys)

    def __init__(self) -> None:
        self._looks: dict[Any, list[Step]] = {}

    def __reduce__(self) -> Any:
        """What is known of a card does not travel."""
        return TritonPass, ()

    def first_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        # Asked of every call of a model that is watched.
        key = _kind(inputs)
        steps = None if key is None else self._looks.get(key)
        return self._first_look(key, inputs) if steps is None else _looked_again(steps, inputs)

    @torch.no_grad()
    def _first_look(self, key: Any, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        if not _is_compact(inputs) or not _takes(inputs):
            return super().first_logit(inputs)
        if key is None or INTERPRETED.value:
            return _of_keys(inputs, None, None)
        # Apart, though they be one: launches tell tensors by which is which.
        x = replace(inputs, q=inputs.q.detach(), k=inputs.k.detach())
        with recorded() as launches:
            found = _of_keys(x, None, None)
        steps = steps_of(launches, (x.q, x.k), (found,))
        if steps is not None:
            self._looks[key] = steps
        return found

    @torch.no_grad()
    def received(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"]
    ) -> Float[Tensor, "b h k"]:
        if not _exact_in_float32(inputs, lse):
            return super().received(inputs, lse)
        with on_card(lse):
            return _received_by_keys(inputs, lse)

    @torch.no_grad()
    def pooled(
        self,
        inputs: AttentionInputs,
        lse: Float[Tensor, "b h q"],
        cells: tuple[int, int],
        queries: tuple[int, int],
        keys: tuple[int, int],
        pool: Pool,
    ) -> Float[Tensor, "b h rows columns"]:
        # Tiles add to the cells they share in no fixed order.
        unordered = pool != "max" and torch.are_deterministic_algorithms_enabled()
        if unordered or not _exact_in_float32(inputs, lse):
            return super().pooled(inputs, lse, cells, queries, keys, pool)
        with on_card(lse):
            return pooled_map(inputs, looking_settings(inputs), lse, cells, queries, keys, pool)

    @torch.no_grad()
    def top(self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], n: int) -> Top:
        many = min(n, inputs.shape.K)
        if not 0 < many <= MOST or not _exact_in_float32(inputs, lse):
            return super().top(inputs, lse, n)
        with on_card(lse):
            return top_keys(inputs, looking_settings(inputs), lse, many)

    @torch.no_grad()
    def mean_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        if not _takes(inputs):
            return super().mean_logit(inputs)
        with on_card(inputs.q):
            return mean_logits(inputs, looking_settings(inputs))

    @torch.no_grad()
    def offset_sums(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], reach: int
    ) -> Float[Tensor, "b h offsets"] | None:
        if not _is_compact(inputs) or not _exact_in_float32(inputs, lse):
            return None
        with on_card(lse):
            return offset_sums(inputs, looking_settings(inputs), lse, reach)

    @torch.no_grad()
    def matching_mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], matches: MatchingKeys
    ) -> tuple[Float[Tensor, "b h q"], Bool[Tensor, "b q"]] | None:
        if not _is_compact(inputs) or not _exact_in_float32(inputs, lse):
            return None
        with on_card(lse):
            return matching_mass(inputs, looking_settings(inputs), lse, matches)

    def mixes_columns(self, inputs: AttentionInputs) -> bool:
        learns = torch.is_grad_enabled() and may_learn(inputs.tensors())
        return not learns and not inputs.dropout and _takes(inputs) and mixes_columns(inputs)

    def weighed(self, inputs: AttentionInputs, columns: Float[Tensor, "b h k c"]) -> Weighed | None:
        if columns.shape[-1] > MOST_COLUMNS or not self.mixes_columns(inputs):
            return None
        with on_card(columns):
            return weighed(inputs, columns)

    @torch.no_grad()
    def value_forms(
        self,
        inputs: AttentionInputs,
        forms: Float[Tensor, "h e e"],
        vectors: Float[Tensor, "b k inner"],
    ) -> tuple[Float[Tensor, "b h k"], Float[Tensor, "b h k"]] | None:
        v = inputs.v
        if v.shape[-1] > WIDEST or not v.dtype == forms.dtype == vectors.dtype:
            return None
        with on_card(v):
            return value_forms(inputs, forms, vectors)

    def head_sums(self, inputs: AttentionInputs, rows: Rows) -> Float[Tensor, "n b h"] | None:
        # Asked of every layer at each step of training that is looked at.
        key = kind_of_sums(inputs, rows)
        if key is None:
            return None
        steps = self._looks.get(key)
        if steps is None:
            return self._first_head_sums(key, inputs, rows)
        sums = memory_for_sums(inputs)
        with on_card(sums):
            launch_again(steps, (inputs.q, inputs.k, *rows, sums))
        return sums

    @torch.no_grad()
    def _first_head_sums(
        self, key: Any, inputs: AttentionInputs, rows: Rows
    ) -> Float[Tensor, "n b h"] | None:
        if not _takes(inputs):
            return None
        if INTERPRETED.value:
            return sums_of_heads(inputs, rows)
        # Apart, though they be one: launches tell tensors by which is which.
        x = replace(inputs, q=inputs.q.detach(), k=inputs.k.detach())
        apart = Rows(*(t.detach() for t in rows))
        with recorded() as launches:
            sums = sums_of_heads(x, apart)
        steps = steps_of(launches, (x.q, x.k, *apart), (sums,))
        if steps is not None:
            self._looks[key] = steps
        return sums


def _takes(x: AttentionInputs) -> bool:
    return not why_not(x)


def _is_compact(x: AttentionInputs) -> bool:
    return is_compact(x.mask, x.shape, x.q.device)


def _exact_in_float32(x: AttentionInputs, lse: Float[Tensor, "b h q"]) -> bool:
    """Whether kernels take such a call, and float32 is exact enough for its weights."""
    return _takes(x) and widened(x, lse) is None


def _kind(x: AttentionInputs) -> Any:
    """What the launch of a look at the first key depends on, if that is not much."""
    q, k, mask, comparison = x.q, x.k, x.mask, x.comparison
    band = None if mask is None else mask.band()
    if x.bias is not None or x.softcap is not None or (mask is not None and band is None):
        return None
    if type(comparison) is not Dot or not q.is_cuda:
        return None
    here = torch.cuda.current_device()
    if q.get_device() != here:
        return None
    return (
        here, q.shape, q.stride(), q.dtype, q.data_ptr() % 16,
        k.shape, k.stride(), k.dtype, k.data_ptr() % 16, band, comparison.scale,
    )  # fmt: skip


def _looked_again(steps: list[Step], x: AttentionInputs) -> Float[Tensor, "b h q"]:
    out = torch.empty(x.q.shape[:3], dtype=torch.float32, device=x.q.device)
    launch_again(steps, (x.q, x.k, out))
    return out


def _of_keys(
    x: AttentionInputs, lse: Float[Tensor, "b h q"] | None, keys: Int[Tensor, "k"] | None
) -> Float[Tensor, "b h q"]:
    """What falls from each query on some keys, or on the first; without an lse, the largest of
    their logits."""
    how = looking_settings(x)
    out = torch.empty(x.shape[:3], dtype=torch.float32, device=x.q.device)
    rule = rule_of(x.mask, x.shape, (how.rows, 16), x.q.device, by_keys=False)
    with on_card(out):
        _mass[(tiles_of(x.shape.Q, how.rows), x.shape.B * x.shape.H)](
            sheet(x.q), sheet(x.k), None if lse is None else lse.contiguous(),
            None if keys is None else keys.contiguous(), out, rule, added(x), score(x), sizes(x),
            1 if keys is None else len(keys),
            **constants_of(x, how.rows, 16, how.precision), LOGITS=lse is None, num_warps=4,
        )  # fmt: skip
    return out


def _received_by_keys(x: AttentionInputs, lse: Float[Tensor, "b h q"]) -> Float[Tensor, "b h k"]:
    how = looking_settings(x)
    plain = x.bias is None and x.softcap is None
    if how.hopper and plain and fits_hopper(x):
        return received_on_hopper(x, lse.contiguous())
    B, H, _, K = x.shape
    out = lse.new_empty(B, H, K)
    rule = rule_of(x.mask, x.shape, (how.rows, how.keys), x.q.device, by_keys=True)
    _received[(tiles_of(K, how.keys), B * H)](
        sheet(x.q), sheet(x.k), lse.contiguous(), out, rule, added(x), score(x), sizes(x),
        **constants_of(x, how.rows, how.keys, how.precision), STAGES=how.stages,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return out
