"""Heads that are given what they had in another run: queries, keys, values, patterns, outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.interpret.interventions.intervention import CallPart, Heads, Intervention
from regard.interpret.interventions.outputs import Place
from regard.traces import Chosen, Trace, places

What = Literal["outputs", "queries", "keys", "values", "patterns"]
WHATS: tuple[What, ...] = ("outputs", "queries", "keys", "values", "patterns")


class Activations(NamedTuple):
    """What a call had and gave, cut from autograd."""

    inputs: AttentionInputs
    out: Float[Tensor, "b h q e"]

    @staticmethod
    def of(trace: Trace) -> Activations:
        cut = trace.detach()
        # A copy: the model goes on with this very tensor, and may write into it.
        return Activations(cut.inputs, cut.rows.out.clone())


@dataclass(frozen=True, eq=False)
class Patched(Intervention):
    """Heads that are given what they had in another run, at all places or at some.

    A pattern is what queries and keys make together: heads with it look where they looked then,
    and read the values of now. A head that shares its keys with others is patched alone.
    """

    heads: Heads
    what: What
    source: Mapping[Place, Activations]
    places: Chosen = None

    def before(self, part: CallPart) -> AttentionInputs:
        x = part.inputs
        match self.what:
            case "queries":
                return replace(x, q=self._mixed(part, "q", x.q))
            case "keys":
                return replace(x, k=self._mixed(part, "k", x.k))
            case "values":
                return replace(x, v=self._mixed(part, "v", x.v))
            case "patterns":
                self._refuse_other_masks(part)
                q, k = (self._mixed(part, name, getattr(x, name)) for name in ("q", "k"))
                return replace(x, q=q, k=k)
        return x

    def after(self, part: CallPart, out: Float[Tensor, "b h q e"]) -> Float[Tensor, "b h q e"]:
        return self._mixed(part, "out", out) if self.what == "outputs" else out

    def _mixed(self, part: CallPart, name: str, own: Tensor) -> Tensor:
        """What these heads had then, in the place of what they have."""
        source = self._of(part)
        mine = torch.tensor(list(self.heads[part.path]), device=own.device)
        if name == "out":
            theirs = source.out[:, mine]
        else:
            group = 1 if name == "q" else source.inputs.group
            theirs = getattr(source.inputs, name)[:, mine // group]
        changed, where = own.clone(), part.where(mine.tolist())
        if theirs.shape != changed[:, where].shape:
            raise RegardError(
                f"what {part.path!r} had in the other run does not fit this one",
                got=f"{list(theirs.shape)} for {list(changed[:, where].shape)} [B, heads, N, D]",
                accepted="two texts of the same number of tokens",
            )
        at = places(self.places, own.shape[2], "places", own.device)
        changed[:, where[:, None], at] = theirs[:, :, at].to(own.dtype)
        return changed

    def _of(self, part: CallPart) -> Activations:
        found = self.source.get((part.path, part.nth))
        if found is None:
            raise RegardError(
                f"{part.path!r} was called more often than in the other run",
                got=f"call {part.nth + 1}",
            )
        return found

    def _refuse_other_masks(self, part: CallPart) -> None:
        x, then = part.inputs, self._of(part).inputs
        if self.places is not None:
            raise RegardError(
                "patterns are patched whole",
                got=f"places={self.places!r}",
                do='patch "queries" at these places, which leaves other rows as they are',
            )
        same = then.shape[2:] == x.shape[2:] and (then.mask is None) == (x.mask is None)
        if same and then.mask is not None and x.mask is not None:
            device = x.q.device
            some = torch.arange(len(x.q), device=device), torch.tensor(part.heads, device=device)
            same = bool(then.mask == x.mask) or bool(then.mask.select(*some) == x.mask)
        if not same or (then.bias is None) != (x.bias is None):
            raise RegardError(
                f"the patterns of {part.path!r} were made under another mask",
                got=f"{then.mask!r} then, {x.mask!r} now",
                accepted="two texts of the same length and padding",
            )
