"""Whether what a head writes raises the token that it looks at: read from the weights of a model
whose form allows it.

A head that looks at a token writes W_O v. On the direct path, past all later layers, that adds
W_U N W_O v to the logits, where N is what the last norm does to a direction, up to its scale.
How the token's own logit stands among those of all tokens, in standard deviations, depends neither
on that scale nor on the norm of what the head writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.backends.contract import SecondPass
from regard.backends.passes import no_autocast
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.copied_tokens.model_form import (
    Form,
    Last,
    Size,
    form_of,
    matrix_of,
)
from regard.interpret.interventions.outputs import Place
from regard.interpret.interventions.runs import Runner
from regard.interpret.rows import matching

CLEAR = 2.0
"""Standard deviations from which on a token counts as raised or lowered."""


@dataclass(frozen=True, eq=False)
class Unembedding:
    """The last linear map, from directions of the residual stream to the logits of tokens."""

    tokens: Float[Tensor, "v d"]
    """For each token, what a direction of the stream is multiplied with; the norm is in it."""
    _last: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _covariances: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def takes(self, projection: Float[Tensor, "d inner"]) -> bool:
        """Whether what a matrix gives is as wide as a direction of the stream."""
        return len(projection) == self.tokens.shape[1]

    def own_logit(
        self,
        x: AttentionInputs,
        asks: SecondPass,
        projection: Float[Tensor, "d inner"],
        ids: Int[Tensor, "b k"],
    ) -> Float[Tensor, "b h k"]:
        """The logit of each key's own token among all tokens, in standard deviations, that each
        head writes where it looks at that key."""
        # On a card a model of half precision is read in such: one product is as large as a layer's.
        half = projection.is_cuda and projection.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.bfloat16 if half else self.tokens.dtype
        projection, x = projection.to(dtype), replace(x, v=x.v.to(dtype))
        H, width = x.shape.H, x.v.shape[-1]
        out = projection.reshape(-1, H, width).transpose(0, 1)
        with no_autocast(x.v):
            seen = (self._covariance_in(dtype) @ projection).reshape(-1, H, width)
            spread = seen.permute(1, 2, 0) @ out
            own = self._of(ids, dtype) @ projection
            variance, raised = asks.value_forms(x, spread, own) or _value_forms(x, spread, own)
        deviation = variance.clamp_min(0).sqrt()
        # A head that writes nothing, or the same for every token, raises none.
        return torch.where(deviation > 0, raised / deviation, 0.0)

    def _of(self, ids: Int[Tensor, "b k"], dtype: torch.dtype) -> Float[Tensor, "b k d"]:
        """What a direction is multiplied with for the token of each key, less the mean of all
        tokens. Every layer asks for those of the same text. Tokens that are read only, such as the
        place of a picture, have no logit to be raised: 0."""
        known = self._last.get(dtype)
        if known is None or known[0] is not ids:
            self._last.clear()
            many = len(self.tokens)
            own = self.tokens[ids.clamp(max=many - 1)] - self._mean
            known = ids, own.masked_fill((ids >= many)[..., None], 0.0).to(dtype)
            self._last[dtype] = known
        return known[1]

    @cached_property
    def _mean(self) -> Float[Tensor, "d"]:
        return self.tokens.mean(0)

    def _covariance_in(self, dtype: torch.dtype) -> Float[Tensor, "d d"]:
        if dtype not in self._covariances:
            centred = self.tokens - self._mean
            self._covariances[dtype] = (centred.T @ centred / len(centred)).to(dtype)
        return self._covariances[dtype]


def _value_forms(
    x: AttentionInputs, forms: Float[Tensor, "h e e"], vectors: Float[Tensor, "b k inner"]
) -> tuple[Float[Tensor, "b h k"], Float[Tensor, "b h k"]]:
    """As `SecondPass.value_forms`, by plain operations."""
    B, H, _, K = x.shape
    G, width = H // x.group, x.v.shape[-1]
    wide = torch.promote_types(forms.dtype, torch.float32)
    # Axes are b, key heads, k, heads of a group, width.
    v = x.v[:, :, :, None]
    bent = x.v @ forms.view(G, x.group, width, width).transpose(1, 2).reshape(G, width, -1)
    quadratic = (bent.view(B, G, K, x.group, width) * v).sum(-1, dtype=wide)
    linear = (vectors.view(B, K, G, x.group, width).transpose(1, 2) * v).sum(-1, dtype=wide)
    return quadratic.transpose(2, 3).reshape(B, H, K), linear.transpose(2, 3).reshape(B, H, K)


@dataclass(frozen=True, eq=False)
class Writing:
    """What is certain of a model's form: its layers, the unembedding, and each layer's
    output projection; or why not."""

    form: Form
    sizes: dict[str, Size]
    last: Place
    """The last call of these layers in a run."""
    unembedding: Unembedding | None
    projections: dict[str, Float[Tensor, "d inner"]]
    why: str = ""
    """What was not found; nothing if all was."""

    def wants(self, path: str) -> bool:
        """Whether a layer is one of these."""
        return path in self.sizes

    def is_last(self, place: Place) -> bool:
        """Whether nothing that comes after a call is asked for."""
        return place == self.last

    def projection(self, path: str, width: int) -> Float[Tensor, "d inner"] | None:
        """The output projection of a layer whose heads together are so wide."""
        return self.projections.get(path)


def writing_of(runner: Runner, text: Any, layers: str | Sequence[str] = "*") -> Writing:
    """The weights by which heads write, where it is sure which these are."""
    model, form = runner.model, form_of(runner, text)
    sizes = {path: form.sizes[path] for path in matching(form.sizes, layers)}
    last = [place for place in form.calls if place[0] in sizes][-1]
    if form.last is None:
        return Writing(form, sizes, last, None, {}, form.why)
    unembedding = unembedding_of(model, form.last)
    if unembedding is None:
        return Writing(form, sizes, last, None, {}, "the last norm takes more than a direction")
    found = {
        path: matrix_of(model.get_submodule(form.projections[path]))
        for path in sizes
        if path in form.projections
    }
    # Where nothing shows that it is added to the stream, it may not even be as wide.
    found = {path: found[path] for path in found if unembedding.takes(found[path])}
    missing = [path for path in sizes if path not in found]
    why = ""
    if missing:
        why = (
            "no output projection that adds to the residual stream was found in "
            + ", ".join(missing[:3])
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    return Writing(form, sizes, last, unembedding, found, why)


@torch.no_grad()
def unembedding_of(model: nn.Module, last: Last) -> Unembedding | None:
    """None where it cannot be seen what the last norm does."""
    matrix = matrix_of(model.get_submodule(last.matrix)).float()
    if last.norm is None:
        return Unembedding(matrix)
    try:
        gain, centres = _norm_of(model.get_submodule(last.norm), matrix.shape[1])
    except Exception:  # whatever else a norm wants to be given
        return None
    matrix = matrix * gain.to(matrix.device)
    # A layer norm takes the mean off every direction.
    return Unembedding(matrix - centres.to(matrix.device) * matrix.mean(1, keepdim=True))


def _norm_of(norm: nn.Module, width: int) -> tuple[Float[Tensor, "d"], Float[Tensor, ""]]:
    """The factor by which a norm multiplies each number, up to one factor for all, and 1 if it
    subtracts their mean, else 0: found by running it. Names do not show this: some multiply with 1
    more than their weight, and T5's layer norm leaves the mean."""
    weight = next(iter(norm.parameters()), None)
    like = torch.empty(0) if weight is None else weight
    up_and_down = torch.ones(width, device=like.device)
    up_and_down[1::2] = -1
    if width % 2 and width > 1:
        up_and_down[-3:] = torch.tensor([1.0, 1.0, -2.0])
    alike = torch.ones_like(up_and_down)
    asked = torch.stack([up_and_down, -up_and_down, alike, -alike])[:, None].to(like.dtype)
    with no_autocast(asked):
        # A bias is in both. Whoever hooks into the model need not know.
        up, down, high, low = norm.forward(asked).float()[:, 0]
    gain, level = (up - down) / up_and_down, high - low
    return gain, (level.norm() < 0.5 * gain.norm()).float()
