"""What is remembered of calls: how calls of a kind are run, after one was checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.backends.contract import Backend, BindsAnew, Repeated, Rows, SecondPass
from regard.biases.bias import Bias
from regard.calls.alike import Alike, alike
from regard.calls.kinds import Kind, step_of
from regard.calls.watchers import columns_for, show, weighs
from regard.inputs import AttentionInputs, drawn_seed
from regard.masks.algebra import Mask
from regard.traces import Trace


@dataclass
class Known:
    """How calls of one kind are run."""

    run: Repeated
    backend: str
    rest: dict[str, Any]
    """The fields of their inputs but for q, k and v."""
    questions: SecondPass | None
    """Answers questions about its traces."""
    mask: Mask | None
    """As it was given: while it is held, no other tensor can get the address of one of its own."""
    beside: tuple[Any, ...] = ()
    """Bias and sink as they were given, held alike."""
    like: Alike | None = None
    """Recognises calls like one that came again, if guards can."""
    came_again: bool = False
    other_mask: Mask | None = None
    """An equal mask that a call came with last: one that comes again is the one to recognise."""

    def trace(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        seed: Int[Tensor, ""] | None = None,
    ) -> Trace:
        """Where weights are dropped, by a seed of its own unless that is given."""
        inputs = self._inputs(q, k, v)
        rows: Rows
        if self.rest["dropout"]:
            inputs.__dict__["seed"] = seed = drawn_seed() if seed is None else seed
            rows = self.run(q, k, v, seed)  # type: ignore[assignment]
        else:
            rows = self.run(q, k, v)  # type: ignore[assignment]
        return self._traced(inputs, rows, mask)

    def shown(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Trace:
        """The same, shown to watchers, as `_shown` of dispatch does."""
        with torch._C.DisableTorchFunction():
            return show(self._weighed(q, k, v, mask) if weighs() else self.trace(q, k, v, mask))

    def _weighed(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Trace:
        """The same, with the columns that a watcher wants mixed beside the values."""
        assert self.questions is not None
        inputs = self._inputs(q, k, v)
        if not self.questions.mixes_columns(inputs):
            return self.trace(q, k, v, mask)
        columns = columns_for(inputs, self.questions)
        rows = None if columns is None else self.questions.weighed(inputs, columns)
        return self.trace(q, k, v, mask) if rows is None else self._traced(inputs, rows, mask)

    # Sets all fields at once: one by one, as frozen dataclasses do it, takes longer than the rest
    # of this class.

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        inputs = object.__new__(AttentionInputs)
        own = inputs.__dict__
        own.update(self.rest)
        own["q"], own["k"], own["v"] = q, k, v
        return inputs

    def _traced(self, inputs: AttentionInputs, rows: Rows, mask: Mask | None) -> Trace:
        made = object.__new__(Trace)
        made.__dict__.update(
            inputs=inputs, rows=rows, backend=self.backend, second_pass=self.questions, mask=mask
        )
        return made


@dataclass
class Bound:
    """How calls of one kind are run, each with a mask and a bias that are bound for it."""

    run: Callable[[AttentionInputs], Rows | Tensor]
    like: Known

    def output(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Bias | None
    ) -> Tensor:
        return self.run(self._inputs(q, k, v, mask, bias))  # type: ignore[return-value]

    def trace(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Bias | None) -> Trace:
        inputs = self._inputs(q, k, v, mask, bias)
        return self.like._traced(inputs, self.run(inputs), mask)  # type: ignore[arg-type]

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Bias | None
    ) -> AttentionInputs:
        inputs = self.like._inputs(q, k, v)
        own, shape = inputs.__dict__, inputs.shape
        if mask is not None:
            own["mask"] = mask.bind(shape, q.device)
        if bias is not None:
            own["bias"] = bias.bind(shape, q.device).computed_in(inputs.compute_dtype)
        return inputs


BOUND: dict[Hashable, Bound | None] = {}
"""Those whose masks and biases are bound anew; None where there is no short way."""
KNOWN: dict[Hashable, Known] = {}
RECENT: dict[bool, tuple[tuple[str | None, Alike, Known], ...]] = {False: (), True: ()}
"""What came again last, of outputs and of traces: the backend that was asked for, what recognises
such calls, and how they are run."""
_LAST = 2
"""How many of them: each that is not meant costs the call that is looked for some time."""
_ROOM = 1024
"""Kinds of calls that are remembered."""
_WITH_TENSORS: deque[Hashable] = deque()
_FEW = 16
"""Kinds that are remembered together with tensors of their masks, which are others in the next
batch."""
_WITH_MORE: deque[Hashable] = deque()
_SOME = 256
"""Kinds that are remembered together with a bias or a sink: each layer of a model has its own."""


def found(kind: Kind) -> Known | None:
    """How calls of a kind are run, if one was made before."""
    # Each step of generating has another number of keys.
    step = step_of(kind) if kind[0][0][2] == 1 else None
    known = None if step is None else KNOWN.get(step)
    return KNOWN.get(kind) if known is None else known


def found_with_more(kind: Hashable | None) -> Known | None:
    """The same for one with dropout, a sink or a bias of few numbers."""
    return None if kind is None else KNOWN.get(kind)


def found_to_bind(kind: Hashable | None) -> Bound | None:
    """The same for one whose mask and bias are bound anew."""
    return None if kind is None else BOUND.get(kind)


def recent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    backend: str | None,
    *,
    statistics: bool,
) -> Known | None:
    """How a call is run that is like one of the last that came again. It has no score, bias,
    soft-cap, sink or dropout, and is outside of compilers."""
    for asked, like, known in RECENT[statistics]:
        if asked == backend and like.found(q, k, v, mask, scale) is not None:
            return known
    return None


def note(
    known: Known,
    kind: Kind,
    given: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    scale: float | None,
    backend: str | None,
    *,
    statistics: bool,
) -> None:
    """A call of a known kind came again, and may do so at once."""
    if not known.came_again:
        known.came_again = True
        known.like = alike(*given, mask, scale, kind, known.run)
    elif known.like is not None and known.like.mask is not mask:
        if known.other_mask is mask:
            known.like = alike(*given, mask, scale, kind, known.run)
        known.other_mask = mask
    # Steps of generating are of one kind, but each has one key more.
    if known.like is None or known.like.found(*given, mask, scale) is None:
        return
    others = (each for each in RECENT[statistics] if each[2] is not known)
    RECENT[statistics] = ((backend, known.like, known), *others)[:_LAST]


def remember_to_bind(
    kind: Hashable,
    inputs: AttentionInputs,
    given: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    chosen: Backend,
    *,
    statistics: bool,
) -> Bound | None:
    """Keep how a call is run whose mask and bias are bound anew each time, or that there is no
    short way."""
    if kind in BOUND:
        return BOUND[kind]
    if len(BOUND) >= _ROOM:
        BOUND.clear()
    BOUND[kind] = None
    as_given = all(a is b for a, b in zip(given, (inputs.q, inputs.k, inputs.v), strict=True))
    if not as_given or not isinstance(chosen, BindsAnew) or _may_be_a_band(mask, inputs.mask):
        return None
    run = chosen.bound_anew(inputs, statistics=statistics)
    if run is None:
        return None
    rest = {f.name: getattr(inputs, f.name) for f in fields(inputs)[3:]}
    rest |= {"mask": None, "bias": None}
    like = Known(run, chosen.name, rest, chosen.questions() if statistics else None, None)
    BOUND[kind] = found = Bound(run, like)
    return found


def _may_be_a_band(mask: Mask | None, bound: Mask | None) -> bool:
    """Whether a mask that holds tensors is a band with the numbers of one call: with others it may
    be none."""
    if mask is None or not mask.tensors():
        return False
    return bound is None or bound.band() is not None


def remember(
    kind: Hashable,
    inputs: AttentionInputs,
    chosen: Backend,
    given: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    *,
    statistics: bool,
    beside: tuple[Any, ...] = (),
) -> Known | None:
    """Keep how a call is run, for others of its kind; None where each must be checked. `beside` are
    its bias and its sink, if the kind tells of them."""
    if not all(a is b for a, b in zip(given, (inputs.q, inputs.k, inputs.v), strict=True)):
        return None
    tensors = [] if mask is None else mask.tensors()
    if inputs.mask is not None and inputs.mask.tensors() and not tensors:
        # It was made for this call.
        return None
    if len(KNOWN) >= _ROOM:
        KNOWN.clear()
        _WITH_TENSORS.clear()
        _WITH_MORE.clear()
    if kind not in KNOWN:
        for few, room in ((_WITH_TENSORS, tensors and _FEW), (_WITH_MORE, beside and _SOME)):
            if room:
                few.append(kind)
            if room and len(few) > room:
                KNOWN.pop(few.popleft(), None)
    run = chosen.repeated(inputs, statistics=statistics)
    questions = chosen.questions() if statistics else None
    rest = {f.name: getattr(inputs, f.name) for f in fields(inputs)[3:]} | {"others": inputs.others}
    known = Known(run, chosen.name, rest, questions, mask, beside)
    KNOWN[kind] = known
    return known
