"""Heads whose output is replaced: by nothing, by its mean, or by what it was for another text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.interventions.intervention import CallPart, Heads, Intervention

Place = tuple[str, int]
"""The path of a layer, and which of its calls in a run."""


@dataclass(frozen=True)
class Replaced(Intervention):
    """Heads whose output is 0, or what is given: per head [H, E], or of a call [B, H, Q, E]."""

    heads: Heads
    outputs: Mapping[Place, Tensor] | None = None

    def after(self, part: CallPart, out: Float[Tensor, "b h q e"]) -> Float[Tensor, "b h q e"]:
        mine = list(self.heads[part.path])
        out, where = out.clone(), part.where(mine)
        if self.outputs is None:
            out[:, where] = 0
            return out
        given = self.outputs[part.path, part.nth]
        given = given[:, None] if given.ndim == 2 else given
        taken = given[..., torch.tensor(mine, device=given.device), :, :].to(out.dtype)
        if taken.ndim == 4 and taken.shape != out[:, where].shape:
            raise RegardError(
                f"outputs of {part.path!r} that are put in the place of others have another shape",
                got=f"{list(taken.shape)} for {list(out[:, where].shape)} [B, heads, Q, E]",
                accepted="texts of the same number of tokens",
                do='cut or pad them to one length, or use by="mean"',
            )
        out[:, where] = taken
        return out
