"""What the rows of a call saw, and what is needed to say how much of it the first key got.

The first key's logit is one product more for each row. Of short calls the products wait until many
can be computed together, since on a card an operation takes longer to start than to run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.masks.algebra import Mask, pairs
from regard.scores.comparison import Dot
from regard.traces import Trace

SHORT = 2**22
"""Queries of so many bytes, or fewer, may wait."""
SMALL = 2**20
"""Keys of so many bytes, or fewer, are kept whole for the sake of the first: more are not kept
alive for it."""


class Looked(NamedTuple):
    """What each row of a call saw."""

    max_logit: Float[Tensor, "b h q"]
    entropy: Float[Tensor, "b h q"]
    lse: Float[Tensor, "b h q"]


class Looks(NamedTuple):
    """The rows of a call, and the first key's logits or what they are computed of."""

    rows: Looked
    kind: Hashable
    """Calls with the same can be added up together."""
    held: int
    """How many bytes wait with it."""
    first: Float[Tensor, "b h q"] | None = None
    q: Float[Tensor, "b h q d"] | None = None
    key: Float[Tensor, "b g d"] | None = None
    scale: float = 1.0
    mask: Mask | None = None
    """As it was bound to the call."""
    given: Mask | None = None
    """As it was given: held, because calls are told apart by which one it is."""

    @staticmethod
    def of(trace: Trace, *, waits: bool = False) -> Looks:
        """Of a call, to be added up at once or, if it waits, later."""
        x, rows = trace.inputs, trace.rows
        q, k, mask, comparison = x.q, x.k, x.mask, x.comparison
        looked = Looked(rows.max_logit, rows.entropy, rows.lse)
        lse = rows.lse
        held = 4 * lse.numel() * lse.element_size()
        size = q.numel() * q.element_size()
        plain = x.bias is None and x.softcap is None and 0 < size <= SHORT and k.shape[2] > 0
        if not plain or type(comparison) is not Dot or (mask is not None and trace.mask is None):
            with torch.no_grad():
                first = trace.second_pass.first_logit(x)
            return Looks(looked, (lse.shape, lse.dtype, lse.device), held, first)
        key = k.select(2, 0)
        # What waits must stay what it was. In training autograd sees to that; elsewhere a cache may
        # be written over in place, or the queries' memory used for something else.
        if waits and not q.requires_grad:
            q = q.clone()
        if waits and (not k.requires_grad or k.numel() * k.element_size() > SMALL):
            key = key.clone()
        which = None if mask is None else mask.band() or id(trace.mask)
        kind = (
            q.shape,
            k.shape[1],
            k.shape[2],
            q.dtype,
            q.device,
            lse.dtype,
            comparison.scale,
            which,
        )
        return Looks(looked, kind, held + size, None, q, key, comparison.scale, mask, trace.mask)


@torch.no_grad()
def first_logits(calls: Sequence[Looks]) -> Float[Tensor, "n b h q"]:
    """The logit of the first key in each row of calls of one kind."""
    known = [call.first for call in calls if call.first is not None]
    if known:
        return torch.stack(known)
    call, dtype = calls[0], calls[0].rows.lse.dtype
    q = torch.stack([call.q for call in calls if call.q is not None])
    key = torch.stack([call.key for call in calls if call.key is not None])
    with torch.autocast(q.device.type, enabled=False):
        # The products are those of matrices, heads that share a key one below the other.
        several = q.to(dtype).reshape(*q.shape[:2], key.shape[2], -1, q.shape[-1])
        column = key.to(dtype).mul(call.scale).unsqueeze(-1)
        found = torch.matmul(several, column).view(q.shape[:-1])
    return _where_seen(found, call.mask)


def _where_seen(logits: Float[Tensor, "n b h q"], mask: Mask | None) -> Float[Tensor, "n b h q"]:
    """Minus infinity for rows that may not see the first key."""
    if mask is None:
        return logits
    band, Q = mask.band(), logits.shape[-1]
    if band is None:
        places = torch.arange(Q, device=logits.device)
        return logits.masked_fill_(~pairs(mask, places, places[:1]).squeeze(-1), -math.inf)
    # Query i sees key 0 if low <= -i <= high.
    start, stop = (min(max(end, 0), Q) for end in (-band[1], 1 - band[0]))
    if start > 0:
        logits[..., : int(start)] = -math.inf
    if stop < Q:
        logits[..., int(stop) :] = -math.inf
    return logits
