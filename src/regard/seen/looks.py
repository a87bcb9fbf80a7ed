"""Row statistics of a call, and what is needed for the weight of the first key.

The first key's logit is one more product for each row. For short calls the products are deferred
until many can be computed together, unless one of our kernels computes them in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.backends.contract import Noted, Tabled
from regard.calls.kinds import is_constant
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask, pairs
from regard.scores.comparison import Dot
from regard.traces import Trace

SHORT = 2**22
"""Queries of so many bytes, or fewer, may wait."""
SMALL = 2**20
"""Keys of so many bytes, or fewer, are kept whole for the sake of the first: more are not kept
alive for it."""


class Looked(NamedTuple):
    """The statistics of each row of a call."""

    max_logit: Float[Tensor, "b h q"]
    entropy: Float[Tensor, "b h q"]
    lse: Float[Tensor, "b h q"]


class Looks(NamedTuple):
    """The rows of a call, and the first key's logits or what they are computed of."""

    rows: Looked | None
    kind: Hashable
    """Calls with the same can be added up together."""
    held: int
    """How many bytes wait with it."""
    first: Float[Tensor, "b h q"] | None = None
    q: Float[Tensor, "b h q d"] | None = None
    key: Float[Tensor, "b g d"] | None = None
    scale: float = 1.0
    span: tuple[int, int] | None = None
    """The rows that may see the first key, where they are one stretch: from here to there."""
    mask: Mask | None = None
    """As it was bound to the call, where they are not."""
    given: Mask | None = None
    """As it was given: held, because calls are distinguished by its identity."""
    visible: Bool[Tensor, "#b #h q"] | None = None
    """In the place of the masks, where they may be written to meanwhile: what they said."""
    table: Float[Tensor, "n b h q"] | None = None
    """In the place of `rows`, and perhaps of `first`: what they are, in this order."""

    @staticmethod
    def of(trace: Trace, *, waits: bool = False) -> Looks:
        """Of a call, to be added up at once. One that `waits` copies what may be written over."""
        x, rows = trace.inputs, trace.rows.plain()
        table = rows.table if isinstance(rows, Tabled) else None
        looked, first_known = None, isinstance(rows, Noted)
        if table is None:
            _, lse, max_logit, entropy = rows
            looked = Looked(max_logit, entropy, lse)
            held = 4 * lse.numel() * lse.element_size()
            alike = (lse.shape, lse.dtype, lse.device)
        else:
            first_known = len(table) > len(Looked._fields)
            held = table.numel() * table.element_size()
            alike = (table.shape, table.dtype, table.device)
        if first_known or trace.backend == "triton":
            first = rows.first if isinstance(rows, Noted) else None
            first = first if first_known else _first_logit(trace)
            return Looks(looked, alike, held, first, table=table)
        q, k, mask, comparison = x.q, x.k, x.mask, x.comparison
        size = q.numel() * q.element_size()
        plain = x.bias is None and x.softcap is None and 0 < size <= SHORT and k.shape[2] > 0
        plain = plain and type(comparison) is Dot and (mask is None or trace.mask is not None)
        if not plain:
            return Looks(looked, alike, held, _first_logit(trace), table=table)
        key = k.select(2, 0)
        # What waits must stay what it was. In training autograd sees to that; elsewhere a cache may
        # be written over in place, or the queries' memory used for something else.
        if waits and not q.requires_grad:
            q = q.clone()
        if waits and (not k.requires_grad or k.numel() * k.element_size() > SMALL):
            key = key.clone()
        assert isinstance(comparison, Dot)
        span = _span(x)
        # Of one text the keys grow with every step; where rows see a stretch of them nothing else
        # changes.
        hidden = (mask, trace.mask) if span is None else (None, None)
        which: Hashable = (k.shape[2], id(trace.mask)) if span is None else span
        visible = None
        # A model may fill the documents or tables of a mask anew for every step.
        if waits and span is None and trace.mask is not None and not is_constant(trace.mask):
            visible = _last_visible.of(x, trace.mask)
            hidden, which = (None, None), ("visible", visible.shape)
        kind = (q.shape, k.shape[1], q.dtype, alike, comparison.scale, which)
        return Looks(
            looked, kind, held + size, None, q, key, comparison.scale, span, *hidden, visible,
            table,
        )  # fmt: skip

    @property
    def looked(self) -> Looked:
        if self.rows is not None:
            return self.rows
        assert self.table is not None
        return Looked(*self.table[:3])

    @property
    def known_first(self) -> Float[Tensor, "b h q"] | None:
        """The first key's logits, where they are known."""
        if self.table is not None and len(self.table) > len(Looked._fields):
            return self.table[-1]
        return self.first

    def reaching(self, max_logit: Float[Tensor, "b h q"]) -> Looks:
        """The same with other largest logits."""
        if self.table is not None:
            return self._replace(table=torch.cat([max_logit[None], self.table[1:]]))
        assert self.rows is not None
        return self._replace(rows=self.rows._replace(max_logit=max_logit))


def _first_logit(trace: Trace) -> Float[Tensor, "b h q"]:
    """Minus infinity where there is no key."""
    if not trace.inputs.shape.K:
        return torch.full_like(trace.rows.lse, -math.inf)
    return trace.second_pass.first_logit(trace.inputs)


def _span(x: AttentionInputs) -> tuple[int, int] | None:
    """The first and last row that see the first key, if the mask is a band."""
    if x.mask is None:
        return 0, x.shape.Q
    band = x.mask.band()
    if band is None:
        return None
    # Query i sees key 0 if low <= -i <= high.
    start, stop = (int(min(max(end, 0), x.shape.Q)) for end in (-band[1], 1 - band[0]))
    return start, stop


def _first_column(mask: Mask, Q: int, device: torch.device) -> Bool[Tensor, "#b #h q"]:
    """Which rows may see the first key."""
    places = torch.arange(Q, device=device)
    return pairs(mask, places, places[:1]).squeeze(-1)


class _LastVisible:
    """Which rows may see the first key by the mask that was asked last: layers share one."""

    def __init__(self) -> None:
        self._known: tuple[ref[Mask], Hashable, Tensor] | None = None

    def of(self, x: AttentionInputs, given: Mask | None) -> Bool[Tensor, "#b #h q"]:
        assert x.mask is not None
        assert given is not None
        # What a mask's function holds is among the tensors of the bound mask alone.
        tensors = [*given.tensors(), *x.mask.tensors()]
        state = None
        # To memory of a CPU others write without being counted, as NumPy does.
        if not x.q.is_cpu and not any(t.is_inference() for t in tensors):
            state = (x.shape, *((t.data_ptr(), t._version) for t in tensors))
        known = self._known
        if known is not None and state is not None and known[0]() is given and known[1] == state:
            return known[2]
        # Fresh memory: what is not repeated is a view of the mask itself.
        visible = _first_column(x.mask, x.shape.Q, x.q.device).clone()
        self._known = ref(given), state, visible
        return visible


_last_visible = _LastVisible()


@torch.no_grad()
def looked_at(
    calls: Sequence[Looks],
) -> tuple[Float[Tensor, "3 n b h q"], Float[Tensor, "n b h q"]]:
    """What the rows of calls of one kind saw, and the logits of their first keys, in fresh
    memory."""
    tables = [call.table for call in calls if call.table is not None]
    if len(tables) == len(calls) and len({len(table) for table in tables}) == 1:
        stacked = torch.stack(tables, 1)
        return stacked[:3], stacked[3] if len(stacked) > 3 else first_logits(calls)
    # Of layers that are alike some may learn, whose rows are tensors of their own.
    rows = [call.looked for call in calls]
    stacked = torch.stack([row for of_calls in zip(*rows, strict=True) for row in of_calls])
    return stacked.unflatten(0, (3, -1)), first_logits(calls)


@torch.no_grad()
def first_logits(calls: Sequence[Looks]) -> Float[Tensor, "n b h q"]:
    """The logit of the first key in each row of calls of one kind."""
    known = [call.known_first for call in calls]
    if any(row is not None for row in known):
        each = zip(known, calls, strict=True)
        return torch.stack(
            [
                first_logits([c])[0] if known_first is None else known_first
                for known_first, c in each
            ]
        )
    call = calls[0]
    dtype = call.looked.lse.dtype
    q = torch.stack([call.q for call in calls if call.q is not None])
    key = torch.stack([call.key for call in calls if call.key is not None])
    with torch.autocast(q.device.type, enabled=False):
        # The products are those of matrices, heads that share a key one below the other.
        several = q.to(dtype).reshape(*q.shape[:2], key.shape[2], -1, q.shape[-1])
        column = key.to(dtype).mul(call.scale).unsqueeze(-1)
        found = torch.matmul(several, column).view(q.shape[:-1])
    return _where_seen(found, calls)


def _where_seen(
    logits: Float[Tensor, "n b h q"], calls: Sequence[Looks]
) -> Float[Tensor, "n b h q"]:
    """Minus infinity for rows that may not see the first key."""
    Q, call = logits.shape[-1], calls[0]
    if call.visible is not None:
        visible = torch.stack([c.visible for c in calls if c.visible is not None])
        return logits.masked_fill_(~visible, -math.inf)
    if call.span is None:
        assert call.mask is not None
        return logits.masked_fill_(~_first_column(call.mask, Q, logits.device), -math.inf)
    start, stop = call.span
    if start > 0:
        logits[..., :start] = -math.inf
    if stop < Q:
        logits[..., stop:] = -math.inf
    return logits
