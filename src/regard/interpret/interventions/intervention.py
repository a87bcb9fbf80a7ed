"""What happens to a seen call: its queries, keys, values and mask before it, its output after it.

`ablate`, `knock_out` and `patch` are made of these, and so is whatever else changes what heads do.
A call is computed as the model asked for it; only the batch entries and heads that an intervention
is about are computed again, on the same path, where it changes what goes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.backends.contract import Rows
from regard.calls.choice import choose
from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.traces import Trace

Heads = Mapping[str, Sequence[int]]
"""Numbers of heads by the path of their layer."""


class UnevenBatchError(RegardError):
    """A batch that is not made of as many equal parts as there are interventions."""


@dataclass
class CallPart:
    """Some batch entries and heads of a seen call, each head with keys and values of its own."""

    path: str
    nth: int
    """Which call of its module this is in the run, from 0."""
    heads: list[int]
    inputs: AttentionInputs
    rows: Rows
    removed: Mask | None = None
    """Pairs of which what was read is taken off the output already."""

    def where(self, heads: Sequence[int]) -> Int[Tensor, "n"]:
        """The places of heads among those of this part."""
        return torch.tensor([self.heads.index(h) for h in heads], device=self.inputs.q.device)


class Intervention:
    """A change of what some heads do. By itself it changes nothing."""

    heads: Heads

    def before(self, part: CallPart) -> AttentionInputs:
        """What goes into a call."""
        return part.inputs

    def after(self, part: CallPart, out: Float[Tensor, "b h q e"]) -> Float[Tensor, "b h q e"]:
        """What comes out of it, given what came out of it so far."""
        return out


def observed(inputs: AttentionInputs) -> Rows:
    """A call computed anew."""
    return choose(inputs, None, statistics=True).observe(inputs)


class About(NamedTuple):
    """Interventions in a call, of which equal parts of the batch are subject to some each. Who
    changes a part of a model knows the call by another path than who changes all of it."""

    path: str
    nth: int
    together: Sequence[Sequence[Intervention]]

    def at(self, place: int) -> list[tuple[About, Intervention]]:
        """Those that one part of the batch is subject to; if there are no parts, all of it."""
        several = self.together[place if len(self.together) > 1 else 0]
        return [(self, one) for one in several if self.path in one.heads]


def changed_output(trace: Trace, every: Sequence[About]) -> Float[Tensor, "b h q e"] | None:
    """The output of a call in which everybody's interventions are carried out, those of the first
    first; None where none is about it."""
    x, path, nth = trace.inputs, every[-1].path, every[-1].nth
    parts = max(len(about.together) for about in every)
    if not any(about.at(place) for about in every for place in range(parts)):
        return None
    if x.dropout:
        raise RegardError(
            "interventions are compared with a model that drops nothing",
            got=f"dropout={x.dropout:g} in {path!r}",
            do="call model.eval() first",
        )
    B, H = x.shape[:2]
    if B % parts or any(len(about.together) not in (1, parts) for about in every):
        raise UnevenBatchError(
            f"the batch of {path!r} is not made of equal parts",
            got=f"{B} batch entries for {parts} interventions",
            do="pass batch=1",
        )
    size, out = B // parts, trace.rows.out.clone()
    for place in range(parts):
        here = [one for about in every for one in about.at(place)]
        heads = sorted({head for about, one in here for head in one.heads[about.path]})
        if heads and not 0 <= heads[0] <= heads[-1] < H:
            raise RegardError(
                f"{path!r} has no such head", got=str(heads), accepted=f"0 to {H - 1}"
            )
        if heads:
            entries = slice(place * size, (place + 1) * size)
            part = _part(path, nth, trace, entries, heads)
            out[entries, heads] = _carried_out(part, here).to(out.dtype)
    return out


def _part(path: str, nth: int, trace: Trace, entries: slice, heads: list[int]) -> CallPart:
    x = trace.inputs
    h = torch.tensor(heads, device=x.q.device)
    b = torch.arange(entries.start, entries.stop, device=x.q.device)
    inputs = replace(x.select(b, h, h // x.group), rank=4, lead=())
    return CallPart(path, nth, heads, inputs, trace.rows.map(lambda t: t[b][:, h]))


def _carried_out(
    part: CallPart, several: Sequence[tuple[About, Intervention]]
) -> Float[Tensor, "b h q e"]:
    given = part.inputs
    for about, one in several:
        part.path, part.nth = about.path, about.nth
        part.inputs = one.before(part)
    if part.inputs is not given:
        part.rows = observed(part.inputs)
    out = part.rows.out
    for about, one in several:
        part.path, part.nth = about.path, about.nth
        out = one.after(part, out)
    return out
