"""Forward and backward passes replayed for other tensors of the same shapes: fresh memory, and the
same launches with other addresses. All that was decided and checked for the first is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.backends import cudnn_plans
from regard.backends.contract import Rows, Tabled, table_step
from regard.backends.passes import Passes, Pull
from regard.backends.triton import cudnn
from regard.backends.triton.backward import launch as launch_backward
from regard.backends.triton.backward import memory_for as backward_memory
from regard.backends.triton.backward import norm_of
from regard.backends.triton.captures import capturing
from regard.backends.triton.forward import Memory, launch, memory_for
from regard.backends.triton.gradients.row_numbers import RowNumbers
from regard.backends.triton.launches.launched import recorded
from regard.backends.triton.layout import rule_of
from regard.backends.triton.replay.steps import (
    Address,
    Fresh,
    Step,
    launch_again,
    made,
    steps_of,
)
from regard.backends.triton.settings.tuning import Forward, forward_settings
from regard.inputs import AttentionInputs

_GIVEN = 3
"""Tensors that a forward pass is given: q, k and v."""


class RepeatedForward:
    """The forward pass of one kind of call, from q, k and v."""

    def __init__(
        self,
        passes: Passes,
        rest: tuple[Any, ...],
        statistics: bool,
        *,
        keeps: bool = True,
        how: Forward | None = None,
    ) -> None:
        self.passes, self.rest, self.statistics = passes, rest, statistics
        self.keeps = keeps
        """Whether what a backward pass needs is wanted: else it is scratch memory."""
        self.how = how
        """Settings, if they are not those that suit the forward pass alone."""
        self.replay: tuple[list[Fresh | None], list[Step]] | None = None
        self.by_cudnn: tuple[float, bool] | None = None
        """Of calls that cuDNN takes: the scale, and whether they are causal."""
        self.asked = self.tabled = False
        self.scratch = True
        """Of such calls: whether what mends them writes to more than the output."""

    def output(self, q: Tensor, k: Tensor, v: Tensor, seed: int | None = None) -> Tensor:
        """The output alone, of passes without statistics of which nothing is kept. A call with
        dropout has a `seed`."""
        if self.replay is None:
            return self(q, k, v, seed)[0].out
        fresh, steps = self.replay
        if self.by_cudnn is not None:
            found, lse = cudnn_plans.attend(q, k, v, *self.by_cudnn)
            if not lse.is_contiguous():
                lse = lse.contiguous()
            rest = made(fresh[2:], q.device) if self.scratch else ()
            launch_again(steps, [q, k, v, found, lse, *rest])
            return found
        memory = made(fresh, q.device)
        launch_again(steps, [q, k, v, *memory], seed)
        out = memory[0]
        assert out is not None
        return out

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: int | None = None
    ) -> tuple[Rows, Tensor]:
        """Rows, and what a backward pass needs. (Where neither statistics nor that are wanted, ask
        for the `output`: there the log-sum-exp is scratch memory too.)"""
        if self.replay is None:
            return self._first(q, k, v, seed)
        fresh, steps = self.replay
        if self.by_cudnn is None:
            memory = made(fresh, q.device)
        else:
            memory = [*cudnn.forward(q, k, v, *self.by_cudnn), *made(fresh[2:], q.device)]
        launch_again(steps, [q, k, v, *memory], seed)
        to = Memory._make(memory)
        return Tabled(to.out, to.largest) if self.tabled else to.rows(), to.norm

    def _first(self, q: Tensor, k: Tensor, v: Tensor, seed: int | None) -> tuple[Rows, Tensor]:
        # Distinct objects even for one tensor: launches identify tensors by object.
        x = AttentionInputs(q.detach(), k.detach(), v.detach(), *self.rest)
        if seed is not None:
            x = replace(x, seed=torch.tensor(seed))
        how = self.how or forward_settings(x, statistics=self.statistics)
        if self.asked:
            return self.passes.forward(x, statistics=self.statistics)
        self.asked = not capturing()
        by_cudnn = cudnn.scale_and_causal(x) if how.cudnn else None
        found = None if by_cudnn is None else cudnn.forward(x.q, x.k, x.v, *by_cudnn)
        rule = rule_of(x.mask, x.shape, (how.rows, how.keys), q.device, by_keys=False)
        kept = self.keeps
        to = memory_for(x, how, rule, statistics=self.statistics, found=found, keeps=kept)
        with recorded() as launches:
            launch(x, how, rule, to, statistics=self.statistics)
        steps = steps_of(launches, (x.q, x.k, x.v), to, x.others)
        if steps is not None:
            fresh = [
                None if t is None else Fresh.like(t, zero=how.hopper and t is to.marks) for t in to
            ]
            if not self.keeps and not _mapped(steps):
                scratch = _SCRATCH
                if not self.statistics and by_cudnn is None:
                    scratch = [*_SCRATCH, _LSE]
                fresh, steps = _few_tensors(fresh, steps, scratch, statistics=self.statistics)
                self.tabled = self.statistics
            self.replay, self.by_cudnn = (fresh, steps), by_cudnn
            self.scratch = any(part is not None and part.nothing is None for part in fresh[2:])
        return to.rows(), to.norm


class RepeatedBackward:
    """The backward pass of one kind of call."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.known: dict[Any, tuple[bool, list[Fresh | None], list[Step]] | None] = {}

    def __call__(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> Sequence[Tensor]:
        g = pull.out
        if g is None or pull.lse is not None or pull.entropy is not None:
            return self.passes.backward(x, rows, kept, pull, bias=False)[:3]
        saved = (x.q, x.k, x.v, rows.out, rows.lse, kept, g)
        key = _key(saved)
        if key not in self.known:
            return self._first(key, x, rows, kept, pull)
        known = self.known[key]
        if known is None:
            return self.passes.backward(x, rows, kept, pull, bias=False)[:3]
        by_cudnn, fresh, steps = known
        found = cudnn.backward(x, rows, g) if by_cudnn else ()
        rest = fresh[len(found) :] if steps else []
        memory = (*found, *made(rest, g.device))
        launch_again(steps, (*saved, *memory), None if x.seed is None else int(x.seed))
        return memory[:3]

    def mending(
        self, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> tuple[list[Fresh | None], list[Step]] | None:
        """What mends gradients that cuDNN has found, if it did before for a call like this: how
        these gradients lie, and launches, which need no other memory."""
        assert pull.out is not None
        key = _key((x.q, x.k, x.v, rows.out, rows.lse, kept, pull.out))
        by_cudnn, fresh, steps = self.known.get(key) or (False, [], [])
        if not by_cudnn or any(part is not None for part in fresh[3:]):
            return None
        return fresh[:3], steps

    def _first(
        self, key: Any, x: AttentionInputs, rows: Rows, kept: Tensor, pull: Pull
    ) -> Sequence[Tensor]:
        assert pull.out is not None
        g = pull.out.detach()
        x = AttentionInputs(x.q.detach(), x.k.detach(), x.v.detach(), *x.beside_tensors())
        by_cudnn = cudnn.runs_backward(x, pull)
        to = backward_memory(x, rows, cudnn.backward(x, rows, g) if by_cudnn else None)
        norm = norm_of(x, rows, kept)
        numbers = RowNumbers(norm, to.shift, None, None, rows.lse.numel(), rows.lse)
        with recorded() as launches:
            launch_backward(x, rows, g, None, numbers, to, None, by_cudnn=by_cudnn)
        given = (x.q, x.k, x.v, rows.out, rows.lse, kept, g)
        steps = steps_of(launches, given, to, x.others)
        if by_cudnn and not launches:
            steps = []
        if steps is not None:
            fresh = [None if t is None else Fresh.like(t, zero=t is to.sums) for t in to]
            self.known[key] = by_cudnn, fresh, steps
        elif not capturing():
            self.known[key] = None
        return to[:3]


def _key(saved: Sequence[Tensor]) -> Any:
    """What decides how a backward pass is run. (Hooks on saved tensors may give them back in
    another layout.)"""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return deterministic, *[(t.dtype, t.stride(), t.data_ptr() % 16) for t in saved]


_SCRATCH = [Memory._fields.index(name) for name in ("norm", "marks", "mixed", "sums")]
"""Memory that nobody reads once a forward pass is over, unless a backward pass follows."""
_LSE = Memory._fields.index("lse")
"""Nor that, where the output is all that is wanted."""
_TABLE = [Memory._fields.index(name) for name in ("largest", "entropy", "lse", "first")]
"""As `Tabled` has them."""
_ALIGNED = 16
"""Bytes at a multiple of which kernels were compiled to find memory."""


def _mapped(steps: list[Step]) -> bool:
    """Whether statistics or scratch memory have tensor maps that are made for each launch, which
    are of whole tensors."""
    found = {one.tensor - _GIVEN for step in steps for one in step.maps}
    return not found.isdisjoint([*_SCRATCH, *_TABLE])


def _few_tensors(
    fresh: list[Fresh | None], steps: list[Step], unread: Sequence[int], *, statistics: bool
) -> tuple[list[Fresh | None], list[Step]]:
    """The memory and the launches of a forward pass with all statistics in one tensor, and all
    that is unread in another: in the places of the first of each."""
    left = fresh.copy()
    moved: dict[int, tuple[int, int]] = {}
    """Which tensor another is in, and at which byte."""
    scratch = {
        at: part
        for at in unread
        if (part := fresh[at]) is not None and not part.zero and part.nothing is None
    }
    size = 0
    for at, part in scratch.items():
        left[at] = None
        moved[at] = _SCRATCH[0], size
        size += _aligned(math.prod(part.shape) * part.dtype.itemsize)
    if size:
        left[_SCRATCH[0]] = Fresh((size,), (1,), torch.uint8, False, None)
    if statistics:
        table = {at: part for at in _TABLE if (part := fresh[at]) is not None}
        lse = fresh[_TABLE[2]]
        assert lse is not None
        number = lse.dtype.itemsize
        step = table_step(math.prod(lse.shape), number)
        for i, at in enumerate(table):
            left[at] = None
            moved[at] = _TABLE[0], i * step * number
        shape, strides = (len(table), *lse.shape), (step, *lse.strides)
        left[_TABLE[0]] = Fresh(shape, strides, lse.dtype, False, None)

    def again(address: Address) -> Address:
        parameter, tensor, offset = address
        if tensor - _GIVEN not in moved:
            return address
        to, start = moved[tensor - _GIVEN]
        return Address(parameter, _GIVEN + to, start + offset)

    return left, [step._replace(addresses=[*map(again, step.addresses)]) for step in steps]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
