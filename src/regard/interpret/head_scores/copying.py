"""Whether what a head writes raises the token that it looks at: read from the weights of a model
whose form allows it.

A head that looks at a token writes W_O v. Straight to the prediction, past all other layers, that
adds W_U N W_O v to the logits, where N is what the last norm does to a direction, up to its scale.
How the token's own logit stands among those of all tokens, in standard deviations, depends neither
on that scale nor on how loud the head is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.interpret.head_scores.model_form import Last, Size, form_of, matrix_of
from regard.interpret.interventions.outputs import Place
from regard.interpret.interventions.runs import Runner
from regard.interpret.rows import matching
from regard.traces import Trace

CLEAR = 2.0
"""Standard deviations from which on a token counts as raised or lowered."""


@dataclass(frozen=True, eq=False)
class Unembedding:
    """The last linear map, from directions of the residual stream to the logits of tokens."""

    tokens: Float[Tensor, "v d"]
    """For each token, what a direction of the stream is multiplied with; the norm is in it."""

    def own_logit(
        self, trace: Trace, projection: Float[Tensor, "d inner"], ids: Int[Tensor, "b k"]
    ) -> Float[Tensor, "b h k"]:
        """The logit of each key's own token among all tokens, in standard deviations, that each
        head writes where it looks at that key."""
        x = trace.inputs
        # On a card a model of half precision is read in such: one product is as large as a layer's.
        half = projection.is_cuda and projection.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.bfloat16 if half else self.tokens.dtype
        projection, v = projection.to(dtype), x.v.to(dtype)
        B, K, width = x.shape.B, x.shape.K, v.shape[-1]
        groups = x.shape.H // x.group
        # Axes are b, k, key heads, heads of a group, width, as far as there are such.
        out = projection.reshape(-1, x.shape.H, width).transpose(0, 1)
        seen = (self._covariance.to(dtype) @ projection).reshape(-1, x.shape.H, width)
        spread = (seen.permute(1, 2, 0) @ out).view(groups, x.group, width, width)
        bent = v @ spread.transpose(1, 2).reshape(groups, width, -1)
        bent = bent.transpose(1, 2).reshape(B, K, groups, x.group, width)
        v = v.transpose(1, 2)[:, :, :, None]
        deviation = (bent * v).sum(-1, dtype=self.tokens.dtype).clamp_min(0).sqrt()
        own = (self.tokens[ids] - self._mean).to(dtype) @ projection
        raised = (own.view_as(bent) * v).sum(-1, dtype=self.tokens.dtype)
        # A head that writes nothing, or the same for every token, raises none.
        stands = torch.where(deviation > 0, raised / deviation, 0.0)
        return stands.flatten(2).transpose(1, 2)

    @cached_property
    def _mean(self) -> Float[Tensor, "d"]:
        return self.tokens.mean(0)

    @cached_property
    def _covariance(self) -> Float[Tensor, "d d"]:
        centred = self.tokens - self._mean
        return centred.T @ centred / len(centred)


@dataclass(frozen=True, eq=False)
class Writing:
    """What of a model's form could be made sure of: its layers, the unembedding, and each layer's
    output projection; or why not."""

    sizes: dict[str, Size]
    last: Place
    """The last call of these layers in a run."""
    unembedding: Unembedding | None
    projections: dict[str, Float[Tensor, "d inner"]]
    why: str = ""
    """What was not found; nothing if all was."""


def writing_of(runner: Runner, text: Any, layers: str | Sequence[str] = "*") -> Writing:
    """The weights by which heads write, where it is sure which these are."""
    model, form = runner.model, form_of(runner, text)
    sizes = {path: form.sizes[path] for path in matching(form.sizes, layers)}
    last = [place for place in form.calls if place[0] in sizes][-1]
    if form.last is None:
        return Writing(sizes, last, None, {}, form.why)
    found = {
        path: matrix_of(model.get_submodule(form.projections[path]))
        for path in sizes
        if path in form.projections
    }
    missing = [path for path in sizes if path not in found]
    why = ""
    if missing:
        why = (
            "no output projection that adds to the residual stream was found in "
            + ", ".join(missing[:3])
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    return Writing(sizes, last, _unembedding(model, form.last), found, why)


def _unembedding(model: nn.Module, last: Last) -> Unembedding:
    norm = None if last.norm is None else model.get_submodule(last.norm)
    matrix = matrix_of(model.get_submodule(last.matrix)).float()
    gain = getattr(norm, "weight", None)
    if isinstance(gain, Tensor):
        offset = 1.0 if norm is not None and "Gemma" in type(norm).__name__ else 0.0
        matrix = matrix * (gain.detach().float() + offset)
    if norm is not None and "RMS" not in type(norm).__name__:
        # A layer norm takes the mean off every direction.
        matrix = matrix - matrix.mean(1, keepdim=True)
    return Unembedding(matrix)
