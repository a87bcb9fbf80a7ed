"""Edges that are cut: these queries may not look at those keys, in these heads.

Before softmax a cut pair is masked, and what is left of the row renormalises. After softmax its
value is removed and nothing else: with E the pairs that are cut,

    out' = out - Σ_E p v = out - exp(lse_E - lse) · out_E,

where out_E and lse_E are those of the same call with only the cut pairs allowed. Both are calls
with a mask, so both run on the fused path, and tiles without a cut pair cost nothing in the second.

Float masks may hold a large negative number in place of minus infinity. What they hide stays hidden
from a row that loses all else by a cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.biases.dense import Dense
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.interpret.interventions.intervention import CallPart, Heads, Intervention, observed
from regard.masks.algebra import And, Mask, Or
from regard.masks.keep import Keep
from regard.masks.packed import Packed
from regard.seen import open_places
from regard.traces import Chosen, places
from regard.values import Shape

Softmax = Literal["before", "after"]
Edge = tuple[Chosen, Chosen]
"""Which queries may not look at which keys: a place, a range, a list, from the end if negative;
None for all."""
Edges = Edge | Mask | Sequence[Edge]
"""One edge or block, several that are cut together, or a mask that allows the pairs to cut."""

FEW = 8
"""Blocks that are combined as masks; more are written out as a table."""
LARGEST = 2**26
"""Pairs of the largest table."""


@dataclass(frozen=True, eq=False)
class Cut(Intervention):
    """Edges that are cut in some heads."""

    heads: Heads
    edges: Edges
    softmax: Softmax = "before"

    def before(self, part: CallPart) -> AttentionInputs:
        if self.softmax != "before":
            return part.inputs
        x = _under(part, ~self._pairs(part))
        if not isinstance(x.bias, Dense):
            return x
        # A row that nothing was open to goes on as it did.
        blind = open_places(part.inputs) == int(x.sink is not None)
        mask: Mask = Keep(x.bias.shown() | blind[..., None])
        return replace(x, mask=mask if x.mask is None else And(x.mask, mask))

    def after(self, part: CallPart, out: Float[Tensor, "b h q e"]) -> Float[Tensor, "b h q e"]:
        if self.softmax != "after":
            return out
        pairs = self._pairs(part)
        # What is read over a pair is taken off once, whoever else cuts it.
        left = pairs if part.removed is None else And(pairs, ~part.removed)
        part.removed = pairs if part.removed is None else Or(part.removed, pairs)
        found = observed(_under(part, left))
        seen = found.lse > -math.inf
        share = torch.where(seen, found.lse - part.rows.lse.masked_fill(~seen, 0.0), -math.inf)
        return out - (share.exp()[..., None] * found.out.to(share.dtype)).to(out.dtype)

    def _pairs(self, part: CallPart) -> Mask:
        """The pairs of the call that are cut."""
        x = part.inputs
        if isinstance(x.mask, Packed):
            raise RegardError(
                f"edges are given by position, but the sequences of {part.path!r} have different "
                f"lengths",
                do="run the model on one text at a time",
            )
        mask = bound(self.edges, x.shape, x.q.device)
        mine = set(self.heads[part.path])
        if mine == set(part.heads):
            return mask
        of_heads = torch.tensor([h in mine for h in part.heads], device=x.q.device)
        return And(mask, Keep(of_heads.view(1, -1, 1, 1)))


def _under(part: CallPart, mask: Mask) -> AttentionInputs:
    """The call with one more mask."""
    x = part.inputs
    return replace(x, mask=mask if x.mask is None else And(x.mask, mask))


def bound(edges: Edges, shape: Shape, device: torch.device) -> Mask:
    """The mask, for a call, that allows the pairs to cut."""
    if isinstance(edges, Mask):
        return edges.bind(shape, device)
    blocks = [
        (places(q, shape.Q, "queries", device), places(k, shape.K, "keys", device))
        for q, k in listed(edges)
    ]
    if len(blocks) <= FEW:
        return reduce(Or, (_block(q, k, shape) for q, k in blocks))
    if shape.Q * shape.K > LARGEST:
        raise RegardError(
            "too many edges of too long a text to be written out one by one",
            got=f"{len(blocks)} edges, {shape.Q} queries, {shape.K} keys",
            accepted=f"{FEW} edges or blocks of any size, or a mask",
            do="give them as a mask: masks.where(lambda b, h, q, k: q - k == 1)",
        )
    table = torch.zeros(1, 1, shape.Q, shape.K, dtype=torch.bool, device=device)
    for q, k in blocks:
        table[0, 0, q[:, None], k] = True
    return Keep(table)


def listed(edges: Edges) -> list[Edge]:
    """Edges that are cut together, one or several."""
    if isinstance(edges, tuple) and len(edges) == 2 and not _is_edge(edges[0]):
        return [edges]  # type: ignore[list-item]
    several = list(edges) if isinstance(edges, (list, tuple)) else []
    if not several or not all(_is_edge(one) for one in several):
        raise RegardError(
            "an edge is a pair of a query and a key",
            got=repr(edges),
            accepted="(query, key), each a place, a range or a list of places, or None for all; a "
            "list of such pairs; or a mask that allows the pairs to cut",
        )
    return several


def refuse_ends_in_padding(text: Any, *chosen: Chosen) -> None:
    """Refuse places from the end where that is padding: texts of a batch end at different places,
    and those of an intervention are one for all."""
    if not isinstance(text, Mapping):
        return
    masks = [text.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    padded = any(isinstance(m, Tensor) and m.ndim == 2 and not m[:, -1:].all() for m in masks)
    if padded and any(_from_end(one) for one in chosen):
        raise RegardError(
            "places from the end are padding in one of the texts",
            got=f"places {', '.join(map(_side, chosen))}, and an attention_mask that ends in 0",
            accepted="places from the start, or texts whose last token is none of padding",
            do="give each text by itself, or pad on the left",
        )


def _from_end(chosen: Chosen) -> bool:
    if isinstance(chosen, slice):
        return any(end is not None and end < 0 for end in (chosen.start, chosen.stop))
    if isinstance(chosen, int):
        return chosen < 0
    # What else it may be is refused where it is used.
    each = chosen.tolist() if isinstance(chosen, Tensor) else chosen
    return isinstance(each, (list, tuple, range)) and any(
        isinstance(one, int) and one < 0 for one in each
    )


def named(edges: Edges) -> str:
    """Edges as a table names them."""
    if isinstance(edges, Mask):
        return repr(edges)
    several = listed(edges)
    shown = ", ".join(f"{_side(q)} → {_side(k)}" for q, k in several[:3])
    return shown if len(several) <= 3 else f"{shown}, … ({len(several)} edges)"


def _side(chosen: Chosen) -> str:
    if chosen is None:
        return "all"
    if isinstance(chosen, range) and chosen.step == 1 and len(chosen) > 1:
        return f"{chosen.start}–{chosen.stop - 1}"
    return str(chosen.tolist() if isinstance(chosen, Tensor) else chosen)


def _is_edge(one: object) -> bool:
    return isinstance(one, tuple) and len(one) == 2


def _block(q: Tensor, k: Tensor, shape: Shape) -> Mask:
    rows, columns = (
        torch.zeros(n, dtype=torch.bool, device=q.device).index_fill_(0, at, True)
        for n, at in ((shape.Q, q), (shape.K, k))
    )
    return And(Keep(rows.view(1, 1, -1, 1)), Keep(columns.view(1, 1, 1, -1)))
