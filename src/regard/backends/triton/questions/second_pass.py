"""Questions about the weights, answered by one more pass over q and k with the log-sum-exp known.

Nothing of size n×n is written. The kernels are in files beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.backends.contract import Pool, Rows, Top, Weighed
from regard.backends.exactness import widened
from regard.backends.questions.matching_keys import MatchingKeys
from regard.backends.tiled.second_pass import TiledPass
from regard.backends.triton.arguments import (
    on_card,
)
from regard.backends.triton.forward import mixes_columns, weighed
from regard.backends.triton.hopper.columns import MOST as MOST_COLUMNS
from regard.backends.triton.launches.launched import recorded
from regard.backends.triton.layout import is_compact
from regard.backends.triton.pairs import (
    INTERPRETED,
)
from regard.backends.triton.questions.answers import Answers, Memory
from regard.backends.triton.questions.head_sums import kind_of_sums, memory_for_sums, sums_of_heads
from regard.backends.triton.questions.key_mass import of_keys
from regard.backends.triton.questions.longest import kind_of_lengths, squared_lengths, told_by
from regard.backends.triton.questions.maps import is_one_launch, pooled_map
from regard.backends.triton.questions.mean_logits import mean_logits
from regard.backends.triton.questions.pair_sums import matching_mass, offset_sums
from regard.backends.triton.questions.received import received_by_keys
from regard.backends.triton.questions.top_keys import MARKS, MOST, top_keys
from regard.backends.triton.questions.value_forms import WIDEST, value_forms
from regard.backends.triton.refusals import why_not
from regard.backends.triton.replay.steps import Step, launch_again, steps_of
from regard.backends.triton.settings.tuning import looking_settings
from regard.inputs import AttentionInputs
from regard.scores.comparison import Dot
from regard.transforms import may_learn, transformed, unobserved


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
        kind = None if learns else _kind_with(("mass", len(keys)), x, lse, keys)
        found = self._given(kind, x, lse, keys)
        if found is not None:
            return found[0]
        if learns or not len(keys) or not _is_compact(x) or not self._exact_in_float32(x, lse):
            return super().mass(x, lse, keys)
        run = _asked_of(x, lambda x, lse, keys: (of_keys(x, looking_settings(x), lse, keys),))
        return self._answers.first(kind, run, (x.q, x.k, lse, keys))[0]

    def __init__(self) -> None:
        self._looks: dict[Any, list[Step]] = {}
        self._answers = Answers()

    def __reduce__(self) -> Any:
        """What is known of a card does not travel."""
        return TritonPass, ()

    def first_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        # Asked of every call of a model that is watched.
        key = _kind(inputs)
        steps = None if key is None else self._looks.get(key)
        return self._first_look(key, inputs) if steps is None else _looked_again(steps, inputs)

    def _given(self, kind: Any, x: AttentionInputs, lse: Tensor, *beside: Tensor) -> Memory | None:
        """An answer of a kind that was given before, if float32 is exact enough for this one."""
        if kind is None:
            return None
        self._measure(x)
        if widened(x, lse) is not None:
            return None
        return self._answers.given(kind, (x.q, x.k, lse, *beside))

    def _exact_in_float32(self, x: AttentionInputs, lse: Float[Tensor, "b h q"]) -> bool:
        """Whether kernels take such a call, and float32 is exact enough for its weights."""
        if not _takes(x):
            return False
        self._measure(x)
        return widened(x, lse) is None

    def _measure(self, x: AttentionInputs) -> None:
        """Find out quickly how large logits may be, where that takes long and was not asked yet."""
        kind = None if "largest_sum" in vars(x) else kind_of_lengths(x)
        if kind is None:
            return
        given = x.q.detach(), x.k.detach()
        found: Memory | None = self._answers.given(kind, given)
        if found is None:
            run = _asked_of(x, lambda x: (squared_lengths(x),))
            found = self._answers.first(kind, run, given, zero=(0,))
        told = told_by(x, found[0])
        if told is not None:
            vars(x)["largest_sum"] = told

    @torch.no_grad()
    def _first_look(self, key: Any, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        if not _is_compact(inputs) or not _takes(inputs):
            return super().first_logit(inputs)
        if key is None or INTERPRETED.value:
            return of_keys(inputs, looking_settings(inputs), None, None)
        # Apart, though they be one: launches tell tensors by which is which.
        x = replace(inputs, q=inputs.q.detach(), k=inputs.k.detach())
        with recorded() as launches:
            found = of_keys(x, looking_settings(x), None, None)
        steps = steps_of(launches, (x.q, x.k), (found,))
        if steps is not None:
            self._looks[key] = steps
        return found

    @torch.no_grad()
    def received(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"]
    ) -> Float[Tensor, "b h k"]:
        kind = _kind_with("received", inputs, lse)
        with on_card(lse):
            sums = self._given(kind, inputs, lse)
            if sums is None:
                if not self._exact_in_float32(inputs, lse):
                    return super().received(inputs, lse)
                run = _asked_of(
                    inputs, lambda x, lse: received_by_keys(x, looking_settings(x), lse)
                )
                sums = self._answers.first(kind, run, (inputs.q, inputs.k, lse.contiguous()))
            return sums[0] if sums[0].ndim == 3 else sums[0].sum(2)

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
        asked = cells, queries, keys, pool
        kind = None if unordered else _kind_with(asked, inputs, lse)
        with on_card(lse):
            found = self._given(kind, inputs, lse)
            if found is not None:
                return found[0]
            if unordered or not self._exact_in_float32(inputs, lse):
                return super().pooled(inputs, lse, *asked)
            how = looking_settings(inputs)
            if not is_one_launch(inputs, how, cells, queries, keys):
                return pooled_map(inputs, how, lse, *asked)
            run = _asked_of(inputs, lambda x, lse: (pooled_map(x, how, lse, *asked),))
            given = inputs.q, inputs.k, lse.contiguous()
            return self._answers.first(kind, run, given, zero=(0,))[0]

    @torch.no_grad()
    def top(self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], n: int) -> Top:
        many = min(n, inputs.shape.K)
        kind = _kind_with(many, inputs, lse)
        with on_card(lse):
            found = self._given(kind, inputs, lse)
            if found is None:
                if not 0 < many <= MOST or not self._exact_in_float32(inputs, lse):
                    return super().top(inputs, lse, n)
                run = _asked_of(inputs, lambda x, lse: top_keys(x, looking_settings(x), lse, many))
                given = inputs.q, inputs.k, lse.contiguous()
                found = self._answers.first(kind, run, given, zero=(MARKS,))
            return Top(*found[:2])

    @torch.no_grad()
    def mean_logit(self, inputs: AttentionInputs) -> Float[Tensor, "b h q"]:
        kind = _kind_with("mean_logit", inputs)
        with on_card(inputs.q):
            found: Memory | None = self._answers.given(kind, (inputs.q, inputs.k))
            if found is None:
                if not _takes(inputs):
                    return super().mean_logit(inputs)
                run = _asked_of(inputs, lambda x: mean_logits(x, looking_settings(x)))
                found = self._answers.first(kind, run, (inputs.q, inputs.k))
            return found[0]

    @torch.no_grad()
    def offset_sums(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], reach: int
    ) -> Float[Tensor, "b h offsets"] | None:
        if not _is_compact(inputs) or not self._exact_in_float32(inputs, lse):
            return None
        with on_card(lse):
            return offset_sums(inputs, looking_settings(inputs), lse, reach)

    @torch.no_grad()
    def matching_mass(
        self, inputs: AttentionInputs, lse: Float[Tensor, "b h q"], matches: MatchingKeys
    ) -> tuple[Float[Tensor, "b h q"], Bool[Tensor, "b q"]] | None:
        if not _is_compact(inputs) or not self._exact_in_float32(inputs, lse):
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


def _kind_with(question: Any, x: AttentionInputs, *beside: Tensor) -> Any:
    """What the launches of a question depend on, if that is not much."""
    inside = x.q, x.k, *beside
    if INTERPRETED.value or not x.q.is_cuda or transformed(inside) or not unobserved(inside):
        return None
    kind = _kind(x) if all(t.is_contiguous() and t.is_cuda for t in beside) else None
    return None if kind is None else (question, kind, *(_traits(t) for t in beside))


def _traits(t: Tensor) -> Any:
    return t.dtype, t.data_ptr() % 16


def _asked_of(x: AttentionInputs, run: Callable[..., Any]) -> Callable[..., Memory]:
    """A question to a call, of other tensors in the place of its own."""
    return lambda q, k, *beside: run(replace(x, q=q, k=k), *beside)


def _looked_again(steps: list[Step], x: AttentionInputs) -> Float[Tensor, "b h q"]:
    out = torch.empty(x.q.shape[:3], dtype=torch.float32, device=x.q.device)
    launch_again(steps, (x.q, x.k, out))
    return out
